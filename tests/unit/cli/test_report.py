"""`lightning-ft report`: from an event log to text, JSON, a page and a picture."""

from __future__ import annotations

import io
import json
import pathlib
import sys

import pytest
from logs import busy
from PIL import Image

from lightning_ft.cli import main


@pytest.fixture
def events(tmp_path: pathlib.Path) -> pathlib.Path:
    """A log whose last line is cut off."""
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join([*busy(4).lines, '{"time": 17']))
    return path


def test_report_is_text_without_options(events: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What happened, in words."""
    assert main(["report", str(events)]) == 0
    assert capsys.readouterr().out.startswith("Training with 3 of 4 members.")


def test_report_as_json_has_the_facts(events: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts."""
    assert main(["report", str(events), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_failures"], told["log"]["num_damaged"], told["is_live"]) == (2, 1, False)


def test_report_reads_standard_input(events: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` is what a pipe brings."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(events.read_bytes())))
    assert main(["report", "-"]) == 0


def test_report_writes_a_page_and_a_picture(
    events: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One HTML file; a PNG in which each incident has a bar with the colours of its phases."""
    page, picture = tmp_path / "report.html", tmp_path / "timeline.png"
    assert main(["report", str(events), "--html", str(page), "--png", str(picture)]) == 0
    assert capsys.readouterr().out == ""
    assert page.read_text().startswith("<!doctype html>")
    image = Image.open(picture)
    colours = {colour for _, colour in image.getcolors(1 << 20) or []}
    assert {(0xB8, 0x6B, 0x00), (0x2C, 0x6F, 0xD3), (0x7A, 0x4D, 0xCF), (0x12, 0x80, 0x6F)} <= colours
    assert image.size[0] == 2400


@pytest.mark.parametrize("lines", [1, 5, 6, 8])
def test_any_beginning_of_a_log_gives_a_page_and_a_picture(tmp_path: pathlib.Path, lines: int) -> None:
    """Before the first view, before the first step, in an incident."""
    events = tmp_path / "events.jsonl"
    events.write_text("\n".join(busy(4).lines[:lines]))
    out = [str(tmp_path / "r.html"), str(tmp_path / "t.png")]
    assert main(["report", str(events), "--html", out[0], "--png", out[1]]) == 0


def test_each_run_of_a_log_has_its_report(
    events: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one, unless another is asked for."""
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join([*busy(1).lines, *busy(4).lines]))
    for arguments, target in (([], 4), (["--run", "1"], 1), (["--run", "2"], 4)):
        assert main(["report", str(both), "--json", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["target"] == target
    assert main(["report", str(both), "--run", "3"]) == 3
    assert "expected --run 1 to 2" in capsys.readouterr().err


def test_what_is_no_log_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 3, and what to give instead."""
    other = tmp_path / "other.txt"
    other.write_text("hello\nworld\n")
    assert main(["report", str(other)]) == 3
    assert "holds no event of a job (2 lines are something else)" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing")]) == 3
    assert "can't be read: No such file" in capsys.readouterr().err


def test_without_pillow_the_picture_says_what_to_install(
    events: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """The page needs nothing."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "lightning_ft.page.picture", raising=False)
    assert main(["report", str(events), "--png", str(tmp_path / "t.png")]) == 3
    assert "pip install 'lightning-ft[report]'" in capsys.readouterr().err
    assert main(["report", str(events), "--html", str(tmp_path / "r.html")]) == 0
