"""The successor of the coordinator that an agent keeps ready: a port, and the rule when to start it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from lightning_ft.config import Settings, parse_endpoint
from lightning_ft.coordinator.agent_client import AgentClient
from lightning_ft.coordinator.channel import reachable_host
from lightning_ft.coordinator.listening import bind
from lightning_ft.launch.coordinator import CoordinatorProcess
from lightning_ft.launch.nodes import is_here, join_endpoint
from lightning_ft.membership.replication import next_term, node_of


class Standby:
    """Takes a lost coordinator's place (PROTOCOL.md, C11).

    Args:
        coordinator: `host:port` of the job's first coordinator.
        node: This node.
        num_nodes: All nodes of the job are below.
        settings: The job's.

    Attributes:
        endpoint: Where the successor would be reached; whoever tries it before is refused at once.

    Raises:
        OSError: There is no way to the coordinator's host, or no port is left.

    Threads: the event loop's.
    """

    def __init__(self, coordinator: str, node: int, num_nodes: int, settings: Settings) -> None:
        self._node = node
        self._num_nodes = num_nodes
        self._settings = settings
        self._last_term = 0
        self._not_before_s = 0.0
        self._host = reachable_host(coordinator)
        host, port = parse_endpoint(coordinator)
        try:  # a port that is open on the one host is so on the others
            self._socket = bind(self._host, 0 if is_here(host) else port)
        except OSError:
            self._socket = bind(self._host, 0)
        self.endpoint = join_endpoint(self._host, self._socket.getsockname()[1])

    def is_due(self, client: AgentClient) -> bool:
        """Whether it is this node's turn: nothing is heard of a coordinator for so long that a lower node had its turn.

        Only who keeps the last coordinator's decisions, and is still one of those who do, may start a successor.
        """
        entry, limit_s = client.replica.entry, self._settings.heartbeat_timeout
        if entry is None or client.replica_id not in entry.replicas:
            return False
        lost = client.replica.term % self._num_nodes
        earlier = [other for other in entry.replicas if other < client.replica_id and node_of(other) != lost]
        is_turn = client.leaderless_s > limit_s * (1 + 0.5 * len(earlier))
        return is_turn and time.monotonic() >= self._not_before_s

    def start(self, client: AgentClient, environment: Mapping[str, str]) -> CoordinatorProcess:
        """Start a successor, which asks all agents; call it in the main thread."""
        self._last_term = next_term(max(client.replica.term, self._last_term), self._node, self._num_nodes)
        pause = 2.5 + random.random()  # noqa: S311 - two that stand against each other must not go on so
        self._not_before_s = time.monotonic() + pause * self._settings.heartbeat_timeout
        self._socket.listen(1024)
        process = CoordinatorProcess(self.endpoint, self._socket)
        process.start(environment, "--replica", str(client.replica_id), "--term", str(self._last_term), "--successor")
        client.add_endpoint(self.endpoint)
        return process

    def renew(self) -> None:
        """Be ready again, after a successor that has closed the port."""
        self._socket.close()
        self._socket = bind(self._host, parse_endpoint(self.endpoint)[1])

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()
