"""Who may have started the process that becomes the agent."""

from __future__ import annotations

import pytest
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_ft.config import Settings
from lightning_ft.errors import LaunchError
from lightning_ft.launch.launcher import AgentLauncher, member_environment

SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "fit"}


@pytest.mark.parametrize(
    ("environment", "variables", "num_nodes", "message"),
    [
        (SLURMEnvironment, SLURM, 2, "--ntasks-per-node=1"),
        (SLURMEnvironment, {**SLURM, "SLURM_NTASKS": "2"}, 3, "SLURM has 2 nodes, the Trainer num_nodes=3"),
        (TorchElasticEnvironment, {"WORLD_SIZE": "2"}, 1, "Write `lightning-ft run` in the place of `torchrun`"),
        (LightningEnvironment, {"LOCAL_RANK": "1"}, 1, "LOCAL_RANK is set"),
    ],
)
def test_other_launchers_of_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    environment: type[ClusterEnvironment],
    variables: dict[str, str],
    num_nodes: int,
    message: str,
) -> None:
    """With what prevents it, and what to write instead."""
    monkeypatch.delenv("LIGHTNING_FT_MEMBER", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launcher = AgentLauncher(environment(), 1, num_nodes, Settings())
    with pytest.raises(LaunchError) as caught:
        launcher.launch(lambda: None)
    assert message in str(caught.value)


def test_several_nodes_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is made up that the other nodes would not know."""
    for name in ("LIGHTNING_FT_MEMBER", "LIGHTNING_FT_TOKEN", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="needs the environment variable LIGHTNING_FT_TOKEN"):
        AgentLauncher(LightningEnvironment(), 1, 2, Settings()).launch(lambda: None)


def test_a_member_has_its_ranks_from_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's variables there are those of the agent's task."""
    for name, value in {**SLURM, "LIGHTNING_FT_MEMBER": "1/2", "LOCAL_RANK": "2", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    environment = member_environment(SLURMEnvironment())
    assert (environment.node_rank(), environment.local_rank()) == (1, 2)
    monkeypatch.delenv("LIGHTNING_FT_MEMBER")
    assert isinstance(member_environment(slurm := SLURMEnvironment()), SLURMEnvironment)
    assert member_environment(slurm) is slurm
