"""Lightning's launcher interface on the agent."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

from lightning_ft.config import Settings, is_joining
from lightning_ft.coordinator.gathering import Beginning
from lightning_ft.errors import LaunchError
from lightning_ft.event_log import say_on_console
from lightning_ft.launch.agent import run_agent
from lightning_ft.launch.nodes import find_nodes, join_endpoint, master_endpoint, token_of_environment
from lightning_ft.lightning_internals import child_command


def member_environment(environment: ClusterEnvironment) -> ClusterEnvironment:
    """Return what tells a member its ranks: in a job that SLURM started, too, that is the agent's environment."""
    is_member = "LIGHTNING_FT_MEMBER" in os.environ
    return LightningEnvironment() if is_member and isinstance(environment, SLURMEnvironment) else environment


class AgentLauncher(_Launcher):
    """Turns the process that the user started into the node's agent; the script runs again in one child per device.

    For `python train.py --devices 2` the agent starts

    ```
    LIGHTNING_FT_MEMBER=0/0 LOCAL_RANK=0 python train.py --devices 2
    LIGHTNING_FT_MEMBER=0/1 LOCAL_RANK=1 python train.py --devices 2
    ```

    and ends with the job's status: what follows `trainer.fit` in the script is run by the children alone.

    Under SLURM, `srun` starts one agent on each node.

    Args:
        cluster_environment: Says who started this process, and which node this is.
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
            LaunchError: Another program has started a process for each rank, which only the agent may.
            ValueError: A job of several nodes lacks its coordinator or its token.
        """
        if "LIGHTNING_FT_MEMBER" in os.environ:
            return function(*args, **kwargs)
        _refuse_other_launchers(self._environment, self._num_nodes)
        if self._num_nodes > 1:
            token_of_environment()
        say_on_console()
        beginning, settings = self._beginning()
        status = run_agent(
            command_for=lambda slot: child_command(slot)[0],
            env_for=self._environment_for,
            node=beginning.node,
            num_slots=self._num_processes,
            settings=settings,
            expected_members=beginning.expected,
            host_coordinator=beginning.node == 0 and not is_joining(os.environ),
            incarnations=beginning.incarnations,
            cwd=child_command(0)[1],
        )
        if trainer is not None:  # nothing of the run happened here: no callback or logger shall see an end
            trainer.callbacks = []  # type: ignore[attr-defined]
            trainer.loggers = []
        raise SystemExit(status)

    def _beginning(self) -> tuple[Beginning, Settings]:
        if is_joining(os.environ):
            node = os.environ.get("NODE_RANK")
            return find_nodes(
                self._settings_of_node(),
                nodes=(1, self._num_nodes),
                node=None if node is None else int(node),
                num_slots=self._num_processes,
                endpoint=None,
                joins=True,
            )
        members = tuple(f"{node}/{slot}" for node in range(self._num_nodes) for slot in range(self._num_processes))
        return Beginning(self._environment.node_rank(), members), self._settings_of_node()

    def _settings_of_node(self) -> Settings:
        """The settings, with the coordinator where Lightning's variables or SLURM's say that node 0 is."""
        if self._num_nodes == 1 or self._settings.coordinator is not None:
            return self._settings
        endpoint = master_endpoint()
        if endpoint is None and isinstance(self._environment, SLURMEnvironment):
            endpoint = join_endpoint(self._environment.main_address, self._environment.main_port)
        return dataclasses.replace(self._settings, coordinator=endpoint)

    def _environment_for(self, slot: int) -> dict[str, str]:
        return {"LOCAL_RANK": str(slot)}

    @override
    def kill(self, signum: int) -> None:
        """Nothing to do in a member: the agent forwards signals."""


def _refuse_other_launchers(environment: ClusterEnvironment, num_nodes: int) -> None:
    """Raises: LaunchError: Somebody else starts, or watches, each rank."""
    if isinstance(environment, SLURMEnvironment):
        num_tasks, found = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        if num_tasks != found:
            raise LaunchError(
                f"starting the job failed: srun has started {num_tasks} tasks on {found} nodes, but the strategy "
                "starts the ranks itself. Start one task on each node: --ntasks-per-node=1 --kill-on-bad-exit=0."
            )
        if found != num_nodes:
            raise LaunchError(f"starting the job failed: SLURM has {found} nodes, the Trainer num_nodes={num_nodes}.")
    elif isinstance(environment, TorchElasticEnvironment):
        raise LaunchError(
            "starting the job failed: torchrun has started this process. Its agent kills all ranks when one fails, and "
            "starts them all again, so that none could survive another. Write `lightning-ft run` in the place of "
            "`torchrun`, with the same flags, or start the script with python."
        )
    elif environment.creates_processes_externally:
        raise LaunchError(
            f"starting the job failed: this process has its rank from {type(environment).__name__} "
            "(LOCAL_RANK is set, or a launcher's variables), but the strategy starts the ranks itself. Start the "
            "script once on each node, without that launcher."
        )
