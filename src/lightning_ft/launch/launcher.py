"""Lightning's launcher interface on the agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

from lightning_ft.config import Settings
from lightning_ft.event_log import say_on_console
from lightning_ft.launch.agent import run_agent
from lightning_ft.lightning_internals import child_command


class AgentLauncher(_Launcher):
    """Turns the process that the user started into the node's agent; the script runs again in one child per device.

    For `python train.py --devices 2` the agent starts

    ```
    LIGHTNING_FT_MEMBER=0/0 LOCAL_RANK=0 python train.py --devices 2
    LIGHTNING_FT_MEMBER=0/1 LOCAL_RANK=1 python train.py --devices 2
    ```

    and ends with the job's status: what follows `trainer.fit` in the script is run by the children alone.

    Args:
        cluster_environment: Says whether the processes were started outside.
        num_processes: Members on this node.
        num_nodes: Nodes of the job.
        settings: Of the job.
    """

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int, settings: Settings
    ) -> None:
        super().__init__()
        self._environment = cluster_environment
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._settings = settings

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` if this process is a member; else be the agent, and end.

        Raises:
            SystemExit: In the agent, with the job's status.
        """
        if "LIGHTNING_FT_MEMBER" in os.environ or self._environment.creates_processes_externally:
            return function(*args, **kwargs)
        self._environment.validate_settings(num_devices=self._num_processes, num_nodes=self._num_nodes)
        say_on_console()
        node = self._environment.node_rank()
        status = run_agent(
            command_for=lambda slot: child_command(slot)[0],
            env_for=self._environment_for,
            node=node,
            num_slots=self._num_processes,
            settings=self._settings,
            expected_members=[f"{n}/{s}" for n in range(self._num_nodes) for s in range(self._num_processes)],
            host_coordinator=node == 0,
            cwd=child_command(0)[1],
        )
        if trainer is not None:  # nothing of the run happened here: no callback or logger shall see an end
            trainer.callbacks = []  # type: ignore[attr-defined]
            trainer.loggers = []
        raise SystemExit(status)

    def _environment_for(self, slot: int) -> dict[str, str]:
        return {"LOCAL_RANK": str(slot)}

    @override
    def kill(self, signum: int) -> None:
        """Nothing to do in a member: the agent forwards signals."""
