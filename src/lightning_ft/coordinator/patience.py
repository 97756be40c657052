"""How long an activity may take before it counts as hung, learned from how long it took so far (`timeout="auto"`)."""

from __future__ import annotations

FACTOR = 10
"""An activity may take this many times as long as it ever took."""

MIN_SEEN = 10
"""How often an activity must have been seen before that is believed."""

AFTER = "after "
"""What an activity's name begins with that may be anything: what follows a collective, or a part of a step."""

_MAX_KINDS = 256

_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")


class Patience:
    """What each kind of activity has taken; numbers in its name don't make it another kind.

    Args:
        least_s: Nothing is given less.
        longest_s: Nothing is given more; what was not seen often enough is given all of it.

    Threads: the training thread learns, any thread asks; no lock, since each value is whole.
    """

    def __init__(self, least_s: float, longest_s: float) -> None:
        self._least_s = least_s
        self._longest_s = longest_s
        self._seen: dict[str, tuple[int, float]] = {}

    def learn(self, doing: str, took_s: float) -> None:
        """Note that an activity took so long."""
        kind = _kind(doing)
        if kind.startswith(AFTER):
            return
        count, longest_s = self._seen.get(kind, (0, 0.0))
        if count or len(self._seen) < _MAX_KINDS:
            self._seen[kind] = (count + 1, max(longest_s, took_s))

    def limit_s(self, doing: str | None) -> float:
        """Return how long an activity may take; None: a wait for others, after which one looks who it is."""
        if doing is None:
            return self._least_s
        count, longest_s = self._seen.get(_kind(doing), (0, 0.0))
        if count < MIN_SEEN:
            return self._longest_s
        return min(max(FACTOR * longest_s, self._least_s), self._longest_s)


def _kind(doing: str) -> str:
    return str(doing).translate(_WITHOUT_DIGITS)
