"""The event log: JSON lines for programs, sentences for people, and no disk that stops a job."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path

import pytest

from lightning_ft.event_log import EventLog, describe, exception_of


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_has_the_common_fields_first(tmp_path: Path) -> None:
    """Time, event, generation and member, then the event's own."""
    log = EventLog(tmp_path / "new" / "directory" / "events.jsonl", clock=lambda: 12.5)
    log.write("view_committed", generation=3, members=("0/0", "0/1"))
    log.write("recovered", generation=3, member="0/1", seconds=0.25, time="not this one")
    log.close()
    assert (tmp_path / "new" / "directory" / "events.jsonl").read_text().splitlines() == [
        '{"time": 12.5, "event": "view_committed", "generation": 3, "member": null, "members": ["0/0", "0/1"]}',
        '{"time": 12.5, "event": "recovered", "generation": 3, "member": "0/1", "seconds": 0.25}',
    ]


def test_events_before_the_path_is_known_are_kept(tmp_path: Path) -> None:
    """They come first in the file, once there is one; the first path stays."""
    log = EventLog()
    log.write("early", generation=0)
    assert not log.flush()
    assert log.open(tmp_path / "events.jsonl")
    assert not log.open(tmp_path / "other.jsonl")
    log.write("late", generation=1)
    assert log.flush()
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["early", "late"]
    log.close()


def test_existing_file_is_appended_to(tmp_path: Path) -> None:
    """A resumed run continues its log."""
    for number in range(2):
        log = EventLog(tmp_path / "events.jsonl")
        log.write("started", generation=number)
        log.close()
    assert [line["generation"] for line in lines(tmp_path / "events.jsonl")] == [0, 1]


def test_failing_disk_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines are lost and counted; writing goes on when the disk is back."""
    (tmp_path / "blocked").write_text("a file where the directory should be")
    log = EventLog(tmp_path / "blocked" / "events.jsonl")
    for number in range(3):
        log.write("lost", generation=number)
    assert log.flush()
    assert log.num_lost == 3
    assert caplog.text.count("can't be written") == 1
    (tmp_path / "blocked").unlink()
    log.write("kept", generation=9)
    log.close()
    assert [line["event"] for line in lines(tmp_path / "blocked" / "events.jsonl")] == ["kept"]


def test_what_json_cannot_hold_is_written_as_text(tmp_path: Path) -> None:
    """An odd field never loses the line."""
    log = EventLog(tmp_path / "events.jsonl")
    log.write("odd", generation=0, path=tmp_path)
    log.close()
    assert lines(tmp_path / "events.jsonl")[0]["path"] == str(tmp_path)


def test_console_speaks_to_a_person(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are warnings, in words, with member and generation."""
    caplog.set_level(logging.INFO, "lightning_ft")
    log = EventLog()
    log.write("failure_detected", generation=4, member="0/2", cause="exit", detail="killed by SIGKILL")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "[0/2 g4] is lost: killed by SIGKILL (cause=exit)"


def test_unknown_event_is_said_by_its_name() -> None:
    """Members may report events that this version has no sentence for; braces in values do no harm."""
    assert describe("lights_on", {"where": "{attic}"}) == (logging.INFO, "lights on (where={attic})")
    assert describe("failure_detected", {"cause": "exit"}) == (logging.WARNING, "failure detected (cause=exit)")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("one line", "ValueError: one line"),
        ("", "ValueError"),
        ("first\nsecond\n\n  third", "ValueError: first [...] third"),
        (
            'Caught KeyError in a worker.\nOriginal Traceback (most recent call last):\n  File "x"\nKeyError: 1',
            "ValueError: Caught KeyError in a worker. [...] KeyError: 1",
        ),
    ],
)
def test_the_exception_of_a_traceback(message: str, expected: str) -> None:
    """It names the exception, whatever its message is."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - any message
        raise ValueError(message) from KeyError("another")
    assert exception_of("".join(traceback.format_exception(raised.value))) == expected
    assert exception_of("".join(traceback.format_exception_only(raised.value))) == expected, "without frames"


def test_the_exception_of_nothing() -> None:
    """Who reported nothing has no exception, and that is no error of ours."""
    assert not exception_of("")


def test_a_start_names_only_the_settings_that_were_changed() -> None:
    """The rest is in the event log. A member's report of that name is said as it is."""
    fields = {"members": ["0/0", "0/1"], "settings": {"respawn": False, "max_restarts": 3}}
    assert describe("job_started", fields)[1] == "the job starts with 0/0, 0/1 (respawn=False)"
    assert describe("job_started", {"settings": "mine"})[1] == "job started (settings=mine)"


def test_followers_get_each_line_that_is_appended() -> None:
    """Word for word as in the file, also what was made by `line`, and nothing from before they came."""
    log, found = EventLog(clock=lambda: 1.0), list[str]()
    log.write("early", generation=0)
    log.follow(found.append)
    log.write("late", generation=1, member="0/1")
    log.append(log.line("kept", generation=2))
    log.resume(["older\n"])
    assert found == [line for line in log.unwritten() if "late" in line or "kept" in line]
