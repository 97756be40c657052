"""The status page and the report in a browser, of a real job in which a rank is killed."""

from __future__ import annotations

import html
import json
import pathlib
import re

import pytest
from logs import busy
from PIL import Image

from lightning_ft.cli import main
from lightning_ft.history.fold import histories
from lightning_ft.page.facts import facts
from lightning_ft.page.key import key_of
from lightning_ft.page.render import page
from tests.integration import jobs
from tests.integration.browser import Browser

WIDTHS = (320, 390, 768, 1280)
SIZES = (1, 4, 64, 1000)

MEASURE = """
onload = () => {
  const boxes = (elements) => [...elements].map((each) => [each.textContent, each.getBoundingClientRect()]).filter(([, box]) => box.width);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const inside = frame.contentDocument;
    const what = frame.title;
    const root = inside.documentElement;
    if (!root.dataset.answers) found.push(`${what}: not drawn`);
    if (root.scrollWidth > root.clientWidth) found.push(`${what}: ${root.scrollWidth} wide`);
    for (const each of inside.querySelectorAll("h1, h2, .value, .took, .when, .name, .since b"))
      if (each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline") found.push(`${what}: cut off: ${each.textContent}`);
    for (const drawing of inside.querySelectorAll("svg")) {
      const texts = boxes(drawing.querySelectorAll("text"));
      const around = drawing.getBoundingClientRect();
      texts.forEach(([text, box], nth) => {
        if (box.left < around.left - 1 || box.right > around.right + 1) found.push(`${what}: outside: ${text}`);
        for (const [other, its] of texts.slice(nth + 1)) if (meet(box, its)) found.push(`${what}: ${text} over ${other}`);
      });
    }
    const siblings = [...inside.querySelectorAll(".incident")].flatMap((row) => [boxes(row.children)]);
    for (const group of [boxes(inside.querySelectorAll(".card")), boxes(inside.querySelectorAll(".figure")), boxes(inside.querySelectorAll(".host")), ...siblings])
      group.forEach(([text, box], nth) => { for (const [other, its] of group.slice(nth + 1)) if (meet(box, its)) found.push(`${what}: ${text.slice(0, 40)} over ${other.slice(0, 40)}`); });
  }
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
};
"""  # noqa: E501
"""A page in frames of several widths is looked at from outside."""


@pytest.fixture
def browser(tmp_path: pathlib.Path) -> Browser:
    """A browser."""
    return Browser(tmp_path / "profile")


def texts(dom: str, pattern: str) -> list[str]:
    """The text inside of what a pattern finds."""
    return [html.unescape(re.sub(r"<[^>]*>", "", found)) for found in re.findall(pattern, dom, re.DOTALL)]


def rows(dom: str) -> dict[str, list[str]]:
    """The cells of each member's row."""
    return {
        member: texts(row, r"<td[^>]*>(.*?)</td>")
        for member, row in re.findall(r'<tr data-member="([^"]*)">(.*?)</tr>', dom, re.DOTALL)
    }


def test_job_that_loses_a_rank_is_seen_in_a_browser(tmp_path: pathlib.Path, browser: Browser) -> None:
    """The page has members, ring and incident while the job runs; the report the same when it is over."""
    there = jobs.at_port() | {"LIGHTNING_FT_FAIL_AT": "0/1=commit.enter@5"}
    address, key = there["LIGHTNING_FT_COORDINATOR"], key_of(there["LIGHTNING_FT_TOKEN"])
    program = ["plain_loop.py", "12", "--hold", "9"]
    with jobs.running(tmp_path / "job", 3, program, there) as job:
        job.wait_until(lambda: "recovered" in {event["event"] for event in job.events()})
        dom = browser.dom(f"http://{address}/?token={key}", is_live=True)
        assert "Training with 2 of 3 members" in dom, dom[-3000:]
        members = rows(dom)
        assert {member: (cells[1], cells[2]) for member, cells in members.items()} == {
            "0/0": ("0", "running"),
            "0/1": ("\u2013", "lost"),
            "0/2": ("1", "running"),
        }
        assert all(cells[4].endswith(" ago") for member, cells in members.items() if member != "0/1")
        (lost,) = [event for event in job.events() if event["event"] == "failure_detected"]
        assert members["0/1"][-1] == lost["detail"]  # its exit, or its connection's end: whichever was seen first
        assert len(re.findall(r'<circle class="node s-running"', dom)) == 2
        assert len(re.findall(r'<circle class="node s-lost"', dom)) == 1
        (incident,) = texts(dom, r'<article class="incident[^>]*>(.*?)</article>')
        assert "0/1 on 127.0.0.1" in incident
        assert "Training went on in step 4." in incident
        assert re.findall(r'<i class="(\w+)"', dom)[-1] == "catch_up"
        assert 'class="curve"' in dom
        assert int(re.findall(r'data-answers="(\d+)"', dom)[0]) >= 1, "it asks for newer facts"
        assert "enter the job's" in browser.dom(f"http://{address}/?token=wrong")
        assert there["LIGHTNING_FT_TOKEN"] not in dom
        assert f"the status page is at http://{address}/" in job.output()
        assert key not in job.output()
        (tmp_path / "job" / "go-9").touch()
        assert job.finish() == 0, job.output()
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "job" / "events.jsonl"), "--html", str(report)]) == 0
    dom = browser.dom(report.as_uri())
    assert "Finished" in texts(dom, r"<h1>(.*?)</h1>")
    assert {cells[2] for cells in rows(dom).values()} == {"lost", "ended"}
    assert len(texts(dom, r'<article class="incident[^>]*>(.*?)</article>')) == 1
    grounds = []
    for is_dark in (False, True):
        picture = tmp_path / f"{is_dark}.png"
        browser.screenshot(report.as_uri(), picture, is_dark=is_dark)
        grounds.append(sum(Image.open(picture).convert("RGB").getpixel((3, 3))) / 3)
    assert grounds[0] > 220
    assert grounds[1] < 40


def test_page_fits_any_width_and_any_number_of_members(tmp_path: pathlib.Path, browser: Browser) -> None:
    """Nothing is cut off, stands outside or over something else, with 1 to 1,000 members, on a phone or a screen."""
    frames = []
    for size in SIZES:
        log = busy(size)
        (history,) = histories(log.lines)
        text = html.escape(page(facts(history, log.now_s)))
        for width in WIDTHS:
            title = f"{size} members, {width} wide"
            frames.append(f'<iframe title="{title}" width="{width}" height="900" srcdoc="{text}"></iframe>')
    outer = tmp_path / "frames.html"
    outer.write_text(f"<!doctype html><body>{''.join(frames)}<script>{MEASURE}</script>")
    (found,) = texts(browser.dom(outer.as_uri()), r'<pre id="found">(.*?)</pre>')
    assert json.loads(found) == []


def test_markup_of_a_job_is_shown_as_text(tmp_path: pathlib.Path, browser: Browser) -> None:
    """A host and an exception that would be scripts are read by the reader, and run by nobody."""
    evil = "</script><img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    log = busy(2, host=evil.replace("{", "{{"))
    log.lose("0/0", detail=evil)
    (history,) = histories(log.lines)
    report = tmp_path / "evil.html"
    report.write_text(page(facts(history, log.now_s)))
    dom = browser.dom(report.as_uri())
    assert "<title>broken" not in dom
    assert "<img" not in dom
    assert evil in texts(dom, r'<span class="name">(.*?)</span>')
