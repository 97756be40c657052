"""The page as HTML: one file without outside assets, which runs no script and loads no style but its own."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any


def page(facts: Mapping[str, Any], poll: str | None = None) -> str:
    """Return the page.

    Args:
        facts: From `facts.facts`.
        poll: Where it asks for newer facts; None: it is a report, and shows these for ever.
    """
    document = _asset("page.html")
    if poll is not None:
        document = document.replace("<body>", f'<body data-poll="{html.escape(poll)}">')
    values = {
        "policy": "" if poll is not None else f'<meta http-equiv="Content-Security-Policy" content="{policy()}">\n',
        "kind": "status" if poll is not None else "report",
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        "facts": as_text(facts),
    }
    for name, value in values.items():
        before, _, after = document.partition("{{" + name + "}}")  # what was put in before is not searched
        document = before + value + after
    return document


def entrance(*, is_wrong: bool) -> str:
    """Return the page for whoever has not shown the job's token yet; `is_wrong`: what was shown is not it."""
    wrong = '<p class="wrong" role="alert">That is not this job\'s token.</p>' if is_wrong else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>lightning_ft</title>'
        f'<link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head><body>'
        '<main class="card enter"><h1>The job\'s token, please</h1>'
        "<p><code>lightning-ft status --open</code> on a machine of the job opens this page. Otherwise enter the job's "
        f"<code>LIGHTNING_FT_TOKEN</code>.</p>{wrong}"
        '<form method="post" action="/"><input type="password" name="token" autocomplete="off" aria-label="Token" '
        "required autofocus><button>Show</button></form></main></body></html>\n"
    )


@functools.cache
def policy() -> str:
    """What the page may do: run its own script, use its own style, ask the place that it came from. Nothing else."""
    script, style = (_digest(_asset(name)) for name in ("page.js", "page.css"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'self'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def as_text(facts: Mapping[str, Any]) -> str:
    """Return facts as JSON that ends no script element and is plain ASCII."""
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _asset(name: str) -> str:
    return importlib.resources.files("lightning_ft.page").joinpath(name).read_text(encoding="utf-8")
