"""The same training in five ways, for side_by_side.py: `side_by_side_loop.py OUT KIND RANKS STEPS`.

`ddp` and `ft_ddp`: a Lightning fit; `plain`: backend `ft`; `torchrun`: DDP that saves and resumes; `torchft`: one
replica of it. Each process appends a line to OUT/<rank>.jsonl for every step that it has committed: time, step,
samples, how many took part. Every rank draws a batch of `BATCH_SIZE` in each of STEPS steps, if nobody fails.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH_SIZE = 8
WIDTH, DEPTH = 512, 4
SAVE_EVERY = 25
"""Steps, of torchrun's checkpoints."""

SILENCE_S = 5.0
"""After which each of the systems is set to give a silent rank up."""


class Samples(Dataset[Any]):
    """As many as are asked for; each knows its number."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.sample = torch.randn(WIDTH)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample, index


def make_net() -> torch.nn.Module:
    """Return a million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def make_optimizer(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the same for all."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


class Log:
    """What one process has committed."""

    def __init__(self, out: pathlib.Path, rank: int) -> None:
        self.file = (out / f"{rank}.jsonl").open("a")
        self.num_steps = 0
        self.write(event="start")

    def write(self, **line: object) -> None:
        """Append a line."""
        self.file.write(json.dumps({"time": time.time(), "pid": os.getpid(), **line}) + "\n")
        self.file.flush()

    def step(self, step: int, indices: torch.Tensor, size: int) -> None:
        """A step is committed."""
        self.num_steps += 1
        status = {} if self.num_steps % 50 else {"memory_kb": _memory_kb("VmRSS"), "peak_kb": _memory_kb("VmHWM")}
        self.write(event="step", step=step, index=indices.tolist(), size=size, **status)


def _memory_kb(field: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(field)).split()[1])


def fit(out: pathlib.Path, strategy: str, num_ranks: int, num_steps: int) -> None:
    """Train with Lightning."""
    import lightning as L

    import lightning_ft  # noqa: F401 - registers ft_ddp

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

    class Steps(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            member = os.environ.get("LIGHTNING_FT_MEMBER", f"0/{trainer.global_rank}")
            self.log_file = Log(out, int(member.partition("/")[2]))

        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.log_file.step(trainer.global_step - 1, batch[1], trainer.world_size)

    trainer = L.Trainer(
        strategy=strategy,
        devices=num_ranks,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps()],
        default_root_dir=out,
    )
    samples = Samples(num_ranks * num_steps * BATCH_SIZE)
    trainer.fit(Model(), DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True))


def plain(out: pathlib.Path, num_ranks: int, num_steps: int) -> None:
    """Train on the backend `ft`, as docs/plain-pytorch.md shows it."""
    import lightning_ft

    log = Log(out, int(os.environ["LIGHTNING_FT_MEMBER"].partition("/")[2]))
    dist.init_process_group("ft")
    model = lightning_ft.ft_ddp(make_net())
    optimizer = make_optimizer(model.parameters())
    samples = Samples(num_ranks * num_steps * BATCH_SIZE)
    sampler = lightning_ft.ElasticDistributedSampler(samples)
    loader = DataLoader(samples, batch_size=BATCH_SIZE, sampler=sampler)
    commits: list[lightning_ft.StepCommit] = []
    model.on_commit = lambda commit: commits.__setitem__(slice(None), [commit])
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, sampler=sampler, step=0)
    sampler.set_epoch(0)
    while sampler.redeal() or sampler.num_left:
        for batch, indices in loader:
            state.boundary()
            if sampler.redeal():
                break
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            sampler.record_batch(len(indices), commits[-1].contributors)
            log.step(state.step, indices, len(commits[-1].contributors))
            state.step += 1


def torchrun(out: pathlib.Path, num_ranks: int, num_steps: int) -> None:
    """Train on DDP; a restarted process goes on with the last checkpoint, as torchrun's documentation has it."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SILENCE_S))
    rank = dist.get_rank()
    log = Log(out, rank)
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    path, step = out / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    samples = Samples(num_ranks * num_steps * BATCH_SIZE)
    order = list(DistributedSampler(samples))[step * BATCH_SIZE :]
    for batch, indices in DataLoader(samples, batch_size=BATCH_SIZE, sampler=order):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        log.step(step, indices, num_ranks)
        step += 1
        if rank == 0 and step % SAVE_EVERY == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, out / "new.pt")
            (out / "new.pt").replace(path)
    dist.destroy_process_group()


def torchft(out: pathlib.Path, num_ranks: int, num_steps: int) -> None:
    """Train one replica as torchft's own example does; it keeps its place in the data after every step."""
    from torchft import DistributedDataParallel as ManagedDDP
    from torchft import DistributedSampler as ManagedSampler
    from torchft import Manager, Optimizer, ProcessGroupGloo

    replica = int(os.environ["REPLICA_GROUP_ID"])
    log = Log(out, replica)
    net = make_net()
    inner = make_optimizer(net.parameters())
    load: Callable[[Any], None] = lambda state: (net.load_state_dict(state["net"]), inner.load_state_dict(state["opt"]))  # type: ignore[assignment, return-value]  # noqa: E731
    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=SILENCE_S)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "opt": inner.state_dict()},
        replica_id=f"side_by_side_{replica}",
        timeout=datetime.timedelta(seconds=30),
    )
    model = ManagedDDP(manager, net)
    optimizer = Optimizer(manager, inner)
    samples = Samples(num_ranks * num_steps * BATCH_SIZE)
    sampler = ManagedSampler(
        samples, replica_rank=replica, num_replica_groups=num_ranks, group_rank=0, num_replicas=1, shuffle=True
    )
    place = out / f"place{replica}"
    num_done = int(place.read_text()) if place.exists() else 0
    order = list(sampler)[num_done * BATCH_SIZE :]
    for batch, indices in DataLoader(samples, batch_size=BATCH_SIZE, sampler=order):
        step = manager.current_step()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        num_done += 1
        place.write_text(str(num_done))
        if manager.current_step() > step:
            log.step(manager.current_step() - 1, indices, manager.num_participants())
        else:
            log.write(event="discarded", index=indices.tolist())


def main() -> None:
    """Train in one way."""
    out, kind, num_ranks, num_steps = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    if kind in ("ddp", "ft_ddp"):
        fit(out, kind, num_ranks, num_steps)
    else:
        {"plain": plain, "torchrun": torchrun, "torchft": torchft}[kind](out, num_ranks, num_steps)


if __name__ == "__main__":
    main()
