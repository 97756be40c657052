"""A Fabric loop whose ranks die and come back: step, data, log and prints are those of a job without a failure."""

from __future__ import annotations

import csv
import pathlib
import re

from tests.integration import jobs
from tests.integration.test_data import check

MEMBERS = ("0/0", "0/1", "0/2")


def logged(job: jobs.Job) -> list[int]:
    """Return the steps in the log, in its order."""
    (path,) = job.out.glob("logs/version_*/metrics.csv")
    with path.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_a_loop_goes_on_with_log_and_data_and_takes_ranks_back(tmp_path: pathlib.Path) -> None:
    """Rank 0 dies between its step and its log, the next one after a reduction; both come back in the same epoch."""
    faults = {"LIGHTNING_FT_FAIL_AT": "0/0=optimizer.done@8; 0/1=commit.done@16", "LIGHTNING_FT_RESPAWN": "1"}
    with jobs.running_fit(tmp_path, 3, ["fabric_fit.py", "605", "2", "--hold", "20"], faults) as job:
        check(job, MEMBERS, 605, 2, max_padding=6)
        contributors = jobs.committed(job, MEMBERS)
        assert jobs.contributors_by_events(job.events(), len(contributors)) == contributors, job.output()
        assert min(len(present) for present in contributors.values()) < len(MEMBERS), job.output()
        assert logged(job) == list(range(len(contributors))), job.output()
        assert len(list(tmp_path.glob("logs/version_*"))) == 1
        ends = [job.records(member)[-1] for member in MEMBERS]
        assert [(end["event"], end["world_size"], end["epoch"]) for end in ends] == [("end", 3, 2)] * 3, job.output()
        assert len({end["hash"] for end in ends}) == 1
        printed = re.findall(r"^epoch (\d): (\d+) validated by 3$", (tmp_path / "output.txt").read_text(), re.MULTILINE)
        assert printed == [("0", "606"), ("1", "606")], job.output()
        assert {event["event"] for event in job.events()} & {"failed", "straggler_detected"} == set(), job.output()
