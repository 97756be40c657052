"""Which nodes' agents are silent: their members can't be killed or seen to end, though they may be well."""

from __future__ import annotations


class Nodes:
    """When each agent was last heard of.

    An agent's silence is reported, and that is all: members that are heard of themselves go on.

    Args:
        limit_s: So long may an agent be silent.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard_s: dict[int, float] = {}
        self._silent: set[int] = set()

    def hear(self, node: int, now_s: float) -> bool:
        """Note a sign of life. Returns: Whether the node had been reported as silent."""
        self._heard_s[node] = now_s
        was_silent = node in self._silent
        self._silent.discard(node)
        return was_silent

    def forget(self, node: int) -> None:
        """Note that an agent has nothing left to do."""
        self._heard_s.pop(node, None)
        self._silent.discard(node)

    def newly_silent(self, now_s: float) -> dict[int, float]:
        """Return the nodes that are to be reported now, each with how long it has been silent."""
        late_s = {node: now_s - heard_s for node, heard_s in self._heard_s.items() if node not in self._silent}
        found = {node: seconds for node, seconds in sorted(late_s.items()) if seconds >= self._limit_s}
        self._silent.update(found)
        return found
