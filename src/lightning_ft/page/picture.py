"""A job's timeline as a picture: goodput, members and incidents. Needs Pillow (`lightning-ft[report]`)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from lightning_ft.history.state import PHASES, History
from lightning_ft.page.facts import duration

_SCALE = 2
"""Pixels for each unit, so that text is sharp on any screen."""

_WIDTH = 1200
_MARGIN = 40
_CHART = (96, 150, _WIDTH - _MARGIN, 380)
"""Left, top, right and bottom of the goodput; the members stand below."""

_MAX_INCIDENTS = 14
_NUM_POINTS = 600

_COLOURS = {
    "page": "#ffffff",
    "text": "#16181d",
    "muted": "#585e6a",
    "line": "#dfe0e4",
    "good": "#14784a",
    "bad": "#bc1f2b",
    "warn": "#8f5400",
    "wait": "#1f5bc4",
    "over": "#16181d",
    "loss": "#f0c4c7",
    "calm": "#c9d8f3",
    "size": "#2c6fd3",
    "size_area": "#d5e2f7",
    "detect": "#cf3f58",
    "park": "#b86b00",
    "rebuild": "#2c6fd3",
    "settle": "#7a4dcf",
    "catch_up": "#12806f",
}
"""Those of the page, where it is light."""

Point = tuple[float, float]


def picture(history: History, shown: Mapping[str, Any]) -> Image.Image:
    """Draw a job's timeline.

    Args:
        history: Of the run.
        shown: Its facts.
    """
    incidents = shown["incidents"][:_MAX_INCIDENTS]
    height = _CHART[3] + 130 + 34 * len(incidents) + (40 if incidents else 0)
    canvas = _Canvas(height)
    _draw_head(canvas, shown)
    _draw_chart(canvas, history, shown)
    if incidents:
        _draw_incidents(canvas, incidents, _CHART[3] + 110)
    return canvas.image


class _Canvas:
    """Draws in units; `_SCALE` pixels are one."""

    def __init__(self, height: float) -> None:
        self.image = Image.new("RGB", (_WIDTH * _SCALE, round(height * _SCALE)), _COLOURS["page"])
        self._draw = ImageDraw.Draw(self.image)
        self._fonts: dict[int, Any] = {}

    def text(self, at: Point, text: str, size: int = 14, colour: str = "text", anchor: str = "ls") -> None:
        self._draw.text(_pixels(at), text, fill=_COLOURS[colour], font=self._font(size), anchor=anchor)

    def fitting(self, text: str, width: float, size: int = 14) -> str:
        """Cut a text to a width."""
        if self._font(size).getlength(text) <= width * _SCALE:
            return text
        while text and self._font(size).getlength(f"{text}...") > width * _SCALE:
            text = text[:-1]
        return f"{text}..."

    def line(self, points: Sequence[Point], colour: str, width: float = 1) -> None:
        self._draw.line([_pixels(point) for point in points], _COLOURS[colour], round(width * _SCALE), joint="curve")

    def area(self, points: Sequence[Point], colour: str) -> None:
        self._draw.polygon([_pixels(point) for point in points], _COLOURS[colour])

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        corners = (*_pixels((left, top)), *_pixels((max(right, left + 1 / _SCALE), bottom)))
        self._draw.rectangle((corners[0], corners[1], corners[2] - 1, corners[3] - 1), _COLOURS[colour])

    def _font(self, size: int) -> Any:
        if size not in self._fonts:
            self._fonts[size] = ImageFont.load_default(size * _SCALE)
        return self._fonts[size]


def _pixels(point: Point) -> tuple[int, int]:
    return round(point[0] * _SCALE), round(point[1] * _SCALE)


def _draw_head(canvas: _Canvas, shown: Mapping[str, Any]) -> None:
    verdict = shown["verdict"]
    canvas.text((_MARGIN, 60), verdict["title"], 30, verdict["level"])
    canvas.text((_MARGIN, 88), canvas.fitting(verdict["text"], _WIDTH - 2 * _MARGIN), 14, "muted")
    parts = [f"{len(shown['ring'])} of {shown['target']} members in the last view"]
    parts += [] if shown["step"] is None else [f"step {shown['step']}"]
    parts += [] if shown["goodput"] is None else [f"goodput {shown['goodput']:.2%}"]
    parts += [f"{shown['num_failures']} failures"]
    parts += [] if shown["recovery_s"] is None else [f"{duration(shown['recovery_s'])} to recover, on average"]
    canvas.text((_MARGIN, 118), "   ".join(parts), 14)
    if shown["started_s"] is not None:
        canvas.text((_WIDTH - _MARGIN, 60), _date(shown["started_s"]), 14, "muted", "rs")


def _date(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _draw_chart(canvas: _Canvas, history: History, shown: Mapping[str, Any]) -> None:
    left, top, right, bottom = _CHART
    since_s, end_s = history.trains_since_s, float(shown["end_s"])
    if since_s is None or end_s <= since_s:
        canvas.text((left, (top + bottom) / 2), "Training has not begun.", 14, "muted")
        return
    span_s = end_s - since_s

    def x(time_s: float) -> float:
        return left + (min(max(time_s, since_s), end_s) - since_s) / span_s * (right - left)

    moments = {since_s + span_s * index / _NUM_POINTS for index in range(1, _NUM_POINTS + 1)}
    moments |= {edge for pause in shown["standstills"] for edge in pause if since_s < edge <= end_s}
    curve = [(moment, history.goodput(moment) or 0.0) for moment in sorted(moments)]
    least = min((share for moment, share in curve if moment > since_s + span_s * 0.02), default=1.0)
    floor = next((value for value in (0.999, 0.99, 0.95, 0.9, 0.8, 0.5) if value < least), 0.0)

    def y(share: float) -> float:
        return bottom - (max(share, floor) - floor) / (1 - floor) * (bottom - top)

    strip = (bottom + 18, bottom + 52)
    for incident in shown["incidents"]:
        ended_s = end_s if incident["ended_s"] is None else incident["ended_s"]
        if ended_s > since_s:
            colour = "loss" if incident["is_failure"] else "calm"
            canvas.box(x(incident["began_s"]), top, max(x(ended_s), x(incident["began_s"]) + 1.5), strip[1], colour)
    for share in (1.0, (1 + floor) / 2, floor):
        canvas.line([(left, y(share)), (right, y(share))], "line")
        canvas.text((left - 10, y(share)), f"{share * 100:.5g} %", 13, "muted", "rm")
    canvas.line([(x(moment), y(share)) for moment, share in curve], "good", 2)
    most = max(max(size, target) for _, size, target in shown["sizes"])
    ends_s = [*(time_s for time_s, _, _ in shown["sizes"][1:]), end_s]
    for (time_s, size, _), last_s in zip(shown["sizes"], ends_s, strict=True):
        level = strip[1] - size / most * (strip[1] - strip[0])
        canvas.box(x(time_s), level, x(last_s), strip[1], "size_area")
        canvas.line([(x(time_s), level), (x(last_s), level)], "size", 1.5)
    canvas.text((left - 10, strip[0]), str(most), 13, "muted", "rm")
    canvas.text((left - 10, strip[1]), "0 members", 13, "muted", "rm")
    canvas.text((left, strip[1] + 20), _date(since_s), 13, "muted")
    canvas.text((right, strip[1] + 20), f"+{duration(span_s)}", 13, "muted", "rs")


def _draw_incidents(canvas: _Canvas, incidents: Sequence[Mapping[str, Any]], top: float) -> None:
    place = _WIDTH - _MARGIN
    for name in reversed(PHASES):
        place -= 80
        canvas.box(place, top - 10, place + 10, top, name)
        canvas.text((place + 16, top), name.replace("_", " "), 13, "muted")
    canvas.text((_MARGIN, top), "Incidents, the latest first", 16)
    for nth, incident in enumerate(incidents):
        line = top + 34 * (nth + 1)
        canvas.line([(_MARGIN, line - 22), (_WIDTH - _MARGIN, line - 22)], "line")
        canvas.text((_MARGIN, line), _date(incident["began_s"])[5:-4], 13, "muted")
        who = ", ".join([loss["member"] for loss in incident["losses"]] or incident["joined"])
        title = canvas.fitting(f"{incident['title']} {who}", 300)
        canvas.text((190, line), title, 14, "bad" if incident["is_failure"] else "text")
        _draw_phases(canvas, incident, 510, _WIDTH - _MARGIN - 110, line)
        canvas.text((_WIDTH - _MARGIN, line), duration(incident["duration_s"]), 14, "text", "rs")


def _draw_phases(canvas: _Canvas, incident: Mapping[str, Any], left: float, right: float, line: float) -> None:
    if not incident["phases"]:
        canvas.text((left, line), "goes on" if incident["ended_s"] is None else incident["outcome"], 13, "muted")
        return
    unit = (right - left) / max(incident["duration_s"], 1e-9)
    for name in PHASES:
        width = incident["phases"].get(name, 0.0) * unit
        canvas.box(left, line - 12, left + width, line + 1, name)
        left += width
