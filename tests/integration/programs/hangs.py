"""Members that hang in different ways between two collectives: `hangs.py OUT STEPS [MEMBER=WAY@STEP]...`.

Ways: `loop` (in Python), `lock` (waits for a lock that nobody releases), `gil` (one call into C that never lets go of
the interpreter), `stop` (SIGSTOP), `busy` (works for long, and says so), `quiet` (in a loop, without a
word before). Each member appends JSON lines to
OUT/<node>-<slot>.jsonl.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import lightning_ft

BUSY_S = 6.0


def hang_in_a_loop() -> None:
    """Compute for ever."""
    while True:
        pass


def hang_at_a_lock() -> None:
    """Wait for itself."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_with_the_gil() -> None:
    """Backtrack for longer than anybody lives."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def be_busy() -> None:
    """Work for longer than `timeout`, and say so."""
    end_s = time.monotonic() + BUSY_S
    while (now_s := time.monotonic()) < end_s:
        lightning_ft.progress(f"counting to {now_s:.0f}")
        time.sleep(0.1)


def stop() -> None:
    """Do nothing any more, with all threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


WAYS = {
    "loop": hang_in_a_loop,
    "lock": hang_at_a_lock,
    "gil": hang_with_the_gil,
    "stop": stop,
    "busy": be_busy,
    "quiet": hang_in_a_loop,
}


def main() -> None:
    """Sum, and hang where it was asked for."""
    member = os.environ["LIGHTNING_FT_MEMBER"]
    asked = dict(argument.split("=") for argument in sys.argv[3:])
    way, _, at = asked.get(member, "@").partition("@")
    dist.init_process_group("ft")
    with (pathlib.Path(sys.argv[1]) / f"{member.replace('/', '-')}.jsonl").open("a") as log:

        def write(**line: object) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        write(event="start", pid=os.getpid())
        for step in range(int(sys.argv[2])):
            lightning_ft.progress(f"step {step}")
            if way and step == int(at):
                if way != "quiet":
                    lightning_ft.progress(f"about to {way}")
                WAYS[way]()
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            write(event="sum", step=step, value=tensor.item())
        write(event="end")


if __name__ == "__main__":
    main()
