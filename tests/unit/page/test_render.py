"""The page as HTML: nothing of a job's becomes markup, and everybody can read it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import importlib.resources
import json
import re

import pytest
from logs import Log, busy

from lightning_ft.history.fold import histories
from lightning_ft.page.facts import facts
from lightning_ft.page.render import as_text, page, policy

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\u2028\ud800{{style}}"
CSS = importlib.resources.files("lightning_ft.page").joinpath("page.css").read_text()


class Tags(html.parser.HTMLParser):
    """Collects tags with their attributes, and what stands in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.inside and data.strip():
            self.inside[self.tags[-1][0]].append(data)


def rendered(log: Log, poll: str | None = None) -> str:
    """A log as a page."""
    (history,) = histories(log.lines)
    return page(facts(history, log.now_s), poll)


def test_nothing_of_a_jobs_becomes_markup() -> None:
    """Hosts, causes and exceptions are data: the page has the tags that it always has, and the facts are unchanged."""
    log = Log(2, host=EVIL.replace("{", "{{").replace("}", "}}"))
    log.lose("0/1", detail=EVIL)
    log.write("failed", "0/1", exception=f"Traceback\nValueError: {EVIL}", signature=EVIL)
    evil, tame = Tags(rendered(log)), Tags(rendered(busy(2)))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in tame.tags]
    embedded, _ = evil.inside["script"]
    told = json.loads(embedded)
    assert told["members"][1]["host"] == EVIL
    assert told["incidents"][0]["losses"][0]["detail"] == EVIL


def test_facts_can_be_read_back() -> None:
    """Escaping changes no value."""
    assert json.loads(as_text({"text": EVIL, "number": 1.5})) == {"text": EVIL, "number": 1.5}


@pytest.mark.parametrize("poll", [None, "/v1/page"])
def test_page_runs_its_own_script_and_loads_nothing(poll: str | None) -> None:
    """The policy names the script and the style by their digests; no tag refers to anything outside."""
    text = rendered(busy(2), poll)
    tags = Tags(text)
    digests = re.findall(r"'sha256-([^']+)'", policy())
    inside = [tags.inside["script"][1], tags.inside["style"][0]]
    assert digests == [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in inside]
    assert "default-src 'none'" in policy()
    assert "unsafe" not in policy()
    policies = [attributes["content"] for _, attributes in tags.tags if attributes.get("http-equiv")]
    assert policies == ([policy()] if poll is None else [])  # a page from the coordinator has it in a header
    outside = [
        name for _, attributes in tags.tags for name in attributes if name in ("src", "style", "srcset", "action")
    ]
    assert outside == []
    assert [attributes["href"] for _, attributes in tags.tags if "href" in attributes] == ["data:,"]
    assert re.findall(r"https?://[^\"'` ]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def colours(block: str) -> dict[str, str]:
    """The colours of a block of CSS by name."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block))


LIGHT = colours(CSS.partition("@media (prefers-color-scheme: dark)")[0])
DARK = LIGHT | colours(CSS.partition("@media (prefers-color-scheme: dark)")[2].partition("* { box-sizing")[0])
PRINT = LIGHT | colours(CSS.partition("@media print")[2])
TEXTS = [
    *[(text, ground) for text in ("text", "muted") for ground in ("bg", "surface", "sunken")],
    *[(text, f"{level}-tint") for level in ("good", "warn", "bad", "calm", "idle") for text in ("text", "muted")],
    *[(level, ground) for level in ("good", "warn", "bad", "calm") for ground in ("surface", f"{level}-tint")],
]
"""Which text stands on which ground."""
SHAPES = [
    (name, ground)
    for name in ("good", "warn", "bad", "calm", "idle", "detect", "park", "rebuild", "settle", "catch_up")
    for ground in ("surface", "sunken")
]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast of two colours."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK, PRINT], ids=["light", "dark", "print"])
def test_contrast_is_that_of_wcag_aa(scheme: dict[str, str]) -> None:
    """4.5 for text, 3 for what carries a meaning by its shape."""
    pale = [(*pair, contrast(*(scheme[name] for name in pair))) for pair in TEXTS]
    assert [pair for pair in pale if pair[2] < 4.5] == []
    faint = [(*pair, contrast(*(scheme[name] for name in pair))) for pair in SHAPES]
    assert [pair for pair in faint if pair[2] < 3] == []
