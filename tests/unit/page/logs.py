"""Event logs of jobs that never ran."""

from __future__ import annotations

import json
from typing import Any


class Log:
    """Writes the lines of a log; time goes on with `wait`."""

    def __init__(self, num_members: int, per_host: int = 8, host: str = "gpu-{:03}.cluster.example") -> None:
        self.lines: list[str] = []
        self.now_s = 1_800_000_000.0
        self.members = [f"{index // per_host}/{index % per_host}" for index in range(num_members)]
        self.view = list(self.members)
        self.generation = 0
        self.step = 0
        self._host = host
        self.write("job_started", members=self.members, settings={"heartbeat_timeout": 10.0})
        for member in self.members:
            self.write("member_joined", member, incarnation=1, host=self.host(member), pid=4711)
        self.commit()
        self.wait(60)

    def host(self, member: str) -> str:
        """Where a member is."""
        return self._host.format(int(member.partition("/")[0]))

    def write(self, event: str, member: str | None = None, **fields: Any) -> None:
        """Append a line."""
        values = {"time": self.now_s, "event": event, "generation": self.generation, "member": member, **fields}
        self.lines.append(json.dumps(values))

    def wait(self, seconds: float) -> None:
        """Let time go on; a step takes a tenth of a second."""
        self.now_s += seconds
        self.step += int(seconds * 10)

    def commit(self) -> None:
        """The next view."""
        self.generation += 1
        self.write("view_committed", members=self.view, reason="all parked")

    def lose(self, *members: str, detail: str = "killed by SIGKILL") -> None:
        """Some die."""
        for member in members:
            where = self.host(member)
            self.write(
                "failure_detected", member, cause="exit", detail=detail, host=where, doing="reduction 7 of world"
            )
            self.view.remove(member)
        self.write("view_suspended", members[0], reason=f"{members[0]} is gone: {detail}")

    def recover(self) -> None:
        """The others go on."""
        self.now_s += 0.5
        self.commit()
        self.now_s += 0.5
        self.write("recovered", self.view[0], latency_s=1.0, park_s=0.5, rebuild_s=0.25, settle_s=0.125, rounds=1,
                   step=self.step, redone="reduce", contributors=self.view)  # fmt: skip

    def admit(self, *members: str) -> None:
        """Some come back."""
        self.write("view_suspended", self.view[0], reason=f"{self.view[0]} parked: join")
        for member in members:
            self.write("member_joined", member, incarnation=2, host=self.host(member), pid=4712)
        self.view += members
        self.commit()
        self.now_s += 0.25
        self.write("members_admitted", self.view[0], latency_s=0.25, park_s=0.1, rebuild_s=0.05, settle_s=0.1, rounds=1,
                   step=self.step, joined=list(members))  # fmt: skip


def busy(num_members: int, **options: Any) -> Log:
    """A job with a loss that is made good, and one that is not."""
    log = Log(num_members, **options)
    if num_members > 1:
        log.lose(log.members[1])
        log.recover()
        log.wait(30)
        log.admit(log.members[1])
        log.wait(600)
        log.lose(log.members[-1])
        log.recover()
    log.wait(60)
    return log
