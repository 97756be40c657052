"""A coordinator, and a member of it that does nothing, for detection.py: `idle_member.py SECONDS`.

Prints, as JSON, the CPU time of the member's monitor thread over so many seconds, without its start.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import sys
import time
import types

package = types.ModuleType("lightning_ft")  # without what its __init__ imports: torch, which takes seconds
package.__path__ = [str(pathlib.Path(__file__).parents[2] / "src" / "lightning_ft")]
sys.modules["lightning_ft"] = package

from lightning_ft.config import Settings  # noqa: E402
from lightning_ft.coordinator.client import MembershipClient  # noqa: E402
from lightning_ft.launch.coordinator import CoordinatorProcess  # noqa: E402
from lightning_ft.membership.events import Address  # noqa: E402

MEMBER = "0/0"
TOKEN = "no-secret"  # noqa: S105 - both ends are here
WARM_UP_S = 3.0


async def main() -> None:
    """Start both, wait, tell."""
    coordinator = CoordinatorProcess(None)
    coordinator.start({"LIGHTNING_FT_TOKEN": TOKEN, "LIGHTNING_FT_EXPECTED": MEMBER})
    with socket.create_server(("127.0.0.1", 0)) as store:
        client = MembershipClient(
            endpoint=coordinator.endpoint,
            token=TOKEN,
            member=MEMBER,
            incarnation=1,
            address=Address("127.0.0.1", store.getsockname()[1]),
            expected=(MEMBER,),
            settings=Settings(),
        )
        client.start()
        await asyncio.to_thread(client.park, 0, "start")
        await asyncio.sleep(WARM_UP_S)
        begin_s, begin_cpu_s = time.monotonic(), _cpu_s(client)
        await asyncio.sleep(float(sys.argv[1]))
        end_s, end_cpu_s = time.monotonic(), _cpu_s(client)
        assert client.is_connected, "the heartbeats were heard"
        assert "torch" not in sys.modules, "a garbage collection would take longer"
        print(json.dumps({"cpu_s": end_cpu_s - begin_cpu_s, "wall_s": end_s - begin_s}))
        client.close()
    await coordinator.end(5.0)


def _cpu_s(client: MembershipClient) -> float:
    assert client._thread is not None
    assert client._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(client._thread.ident))


if __name__ == "__main__":
    asyncio.run(main())
