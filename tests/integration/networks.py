"""Hosts on one machine: network namespaces, each with one network card, joined by a bridge. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest

_numbers = itertools.count()

NOWHERE = "02:00:00:00:00:00"
"""A hardware address that no card has."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)  # noqa: S607 - wherever it is


class Host:
    """A namespace with one card, `eth0`.

    Attributes:
        address: Of its card.
    """

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def card_down(self) -> None:
        """Break the card, as in life: no peer hears anything of it."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def card_up(self) -> None:
        """Mend the card."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def lose_packets_to(self, other: Host) -> None:
        """Lose all that this host sends to another, without a word; what that sends still arrives."""
        entry = (other.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        _ip("-n", self.namespace, "neigh", "replace", *entry)

    def find_again(self, other: Host) -> None:
        """End `lose_packets_to`."""
        _ip("-n", self.namespace, "neigh", "del", other.address, "dev", "eth0")


@contextlib.contextmanager
def hosts(num: int) -> Iterator[list[Host]]:
    """Make hosts that reach one another; where that can't be done, the test is skipped, but fails in CI."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("network namespaces need root and iproute2")
    name = f"lft{os.getpid() % 10_000}-{next(_numbers)}"
    subnet = f"10.{77 + os.getpid() % 100}.{next(_numbers) % 250}"
    with contextlib.ExitStack() as undo:
        bridge = f"{name}b"
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        made = []
        for number in range(num):
            namespace, inside = f"{name}h{number}", f"{name}v{number}"
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "del", namespace)
            _ip("link", "add", inside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            undo.callback(_ip, "link", "del", inside)
            _ip("link", "set", inside, "master", bridge, "up")
            host = Host(namespace, f"{subnet}.{number + 1}")
            _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            host.card_up()
            made.append(host)
        yield made
