"""A small, fast Lightning run that harms itself: `matrix_fit.py OUT DEVICES [FAULT@MOMENT=MEMBER[,MEMBER]...]...`.

Faults are the keys of `FAULTS`; moments are `MOMENTS`, or a named point of a recovery (`recover.build`), which counts
from the fourth batch of the second epoch on. Each member appends JSON lines to OUT/<node>-<slot>.jsonl.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import lightning as L
import torch
import torch.distributed as dist
from hits import Hit
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, get_worker_info

import lightning_ft
from lightning_ft import faultpoints
from lightning_ft.comm.process_group import FaultTolerantProcessGroup

MOMENTS = (
    "setup",
    "sanity_check",
    "first_step",
    "first_backward",
    "mid_epoch",
    "validation",
    "epoch_end",
    "save",
    "second_epoch",
    "last_step",
)
"""In order of time. `second_epoch` is its fifth batch."""

BATCH_SIZE = 4
NUM_SAMPLES = 320
NUM_VALIDATION_SAMPLES = 64
MID_EPOCH = 9
VALIDATION_BATCH = 1
ARMED_BATCH, SECOND_EPOCH_BATCH = 3, 4

STOP_S = 1.0
"""Shorter than `heartbeat_timeout`."""

PAUSE_S = 2.0
"""Shorter than `timeout`."""


class PlacedError(Exception):
    """No RuntimeError: that is what a broken ring looks like."""


# -- the faults ------------------------------------------------------------------------------------------------------


def send_self(number: signal.Signals) -> Callable[[Hit], None]:
    """Return what sends a signal to this process."""
    return lambda _: os.kill(os.getpid(), number)


def stop_for_a_while(_: Hit) -> None:
    """Stop all threads; a helper that sees it wakes them."""
    status = f"/proc/{os.getpid()}/status"
    script = f"until grep -q '^State:.T' {status}; do sleep 0.02; done; sleep {STOP_S}; kill -CONT {os.getpid()}"
    helper = subprocess.Popen(["/bin/sh", "-c", script])
    os.kill(os.getpid(), signal.SIGSTOP)
    helper.wait()


def segfault(_: Hit) -> None:
    """Read from address 0."""
    ctypes.string_at(0)


def leave_with(status: int) -> Callable[[Hit], NoReturn]:
    """Return what ends the interpreter in the ordinary way."""
    return lambda _: sys.exit(status)


def fail(hit: Hit) -> NoReturn:
    """Raise what nobody catches."""
    raise PlacedError(f"placed at {hit.moment}")


def hold_the_gil(_: Hit) -> None:
    """Backtrack for longer than anybody lives."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def run_out_of_memory(_: Hit) -> None:
    """Take all that the limit leaves, and keep it: what handles the MemoryError has no more either."""
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hoard = []
    while True:
        hoard.append(bytearray(1 << 20))


def loop(_: Hit) -> NoReturn:
    """Compute for ever."""
    while True:
        pass


def wait_for_itself(_: Hit) -> None:
    """Wait for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def collect_alone(_: Hit) -> None:
    """Issue a collective that no other rank issues."""
    dist.all_reduce(torch.ones(3))


def collect_misshapen(hit: Hit) -> None:
    """Issue a collective with everybody, but of other shape."""
    dist.all_reduce(torch.ones(7 if member() in hit.members else 3))


def be_slow(_: Hit) -> None:
    """Work for longer than `heartbeat_timeout` would be in another thread's place; the others wait."""
    time.sleep(PAUSE_S)


def kill_the_coordinator(_: Hit) -> None:
    """Kill the one that runs, or the next if it has just been killed."""
    agent = os.getppid()
    while True:
        for pid in map(int, pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            if b"coordinator.standalone" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return


def kill_the_agent(_: Hit) -> None:
    """Kill the parent."""
    os.kill(os.getppid(), signal.SIGKILL)


def fill_the_logs(_: Hit) -> None:
    """Leave no room in the file system of OUT/logs."""
    fill("logs")


def fill_the_events(_: Hit) -> None:
    """Leave no room in the file system of OUT/events, and have more written than the last page may still hold."""
    fill("events")
    group = dist.group.WORLD
    assert isinstance(group, FaultTolerantProcessGroup)
    group.ring.report("placed", text="x" * 2 * 4096)


def fill(name: str) -> None:
    """Write until the disk is full."""
    path = pathlib.Path(sys.argv[1]) / name / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            print(f"{path.parent} is full: {error.errno}", flush=True)


FAULTS: dict[str, Callable[[Hit], None]] = {
    "kill": send_self(signal.SIGKILL),
    "terminate": send_self(signal.SIGTERM),
    "interrupt": send_self(signal.SIGINT),
    "stop": send_self(signal.SIGSTOP),
    "short_stop": stop_for_a_while,
    "abort": lambda _: os.abort(),
    "segfault": segfault,
    "exit_0": leave_with(0),
    "exit_1": leave_with(1),
    "exception": fail,
    "callback_exception": fail,
    "worker_exception": fail,
    "worker_killed": send_self(signal.SIGKILL),
    "gil": hold_the_gil,
    "memory": run_out_of_memory,
    "loop": loop,
    "lock": wait_for_itself,
    "lone_collective": collect_alone,
    "misshapen_collective": collect_misshapen,
    "slow": be_slow,
    "coordinator_killed": kill_the_coordinator,
    "agent_killed": kill_the_agent,
    "logs_full": fill_the_logs,
    "events_full": fill_the_events,
}

BY_ALL = frozenset({"misshapen_collective"})
"""Faults in which the others have a part."""


def member() -> str:
    """Return this process's name; the agent has none, and never gets into fit."""
    return os.environ.get("LIGHTNING_FT_MEMBER", "agent")


class Saboteur:
    """Does each fault once, where the run gets to its moment.

    Args:
        hits: Of all members.
        write: For the records.
    """

    def __init__(self, hits: list[Hit], write: Callable[..., None]) -> None:
        self.write = write
        mine = [hit for hit in hits if hit.fault in BY_ALL or member() in hit.members]
        self.in_workers = [hit for hit in mine if hit.fault.startswith("worker_")]
        self.in_recovery = [hit for hit in mine if hit.moment.startswith("recover.")]
        rest = [hit for hit in mine if hit not in (*self.in_workers, *self.in_recovery)]
        self.is_leaving = False
        self.in_callbacks = {hit.moment: hit for hit in rest if hit.fault == "callback_exception"}
        self.in_model = {hit.moment: hit for hit in rest if hit.fault != "callback_exception"}

    def reach(self, moment: str, hits: dict[str, Hit]) -> None:
        """Do the fault that is due."""
        hit = hits.pop(moment, None)
        if hit is not None:
            self.strike(hit)

    def strike(self, hit: Hit) -> None:
        """Say what is about to happen, and do it."""
        self.write(event="fault", fault=hit.fault, moment=hit.moment)
        self.is_leaving |= hit.fault == "terminate"
        FAULTS[hit.fault](hit)

    def arm(self) -> None:
        """Let the points of a recovery be reached from now on."""
        for hit in self.in_recovery:
            faultpoints._faults.extend(faultpoints.parse(f"{member()}={hit.moment}", member()))
            faultpoints._fail = self._strike_at

    def _strike_at(self, point: str, action: str) -> None:
        self.strike(next(hit for hit in self.in_recovery if hit.moment == point))


class Samples(Dataset[torch.Tensor]):
    """Random numbers; in a DataLoader worker, one of them may be the last."""

    def __init__(self, length: int, seed: int, hits: Mapping[int, Hit]) -> None:
        self.x = torch.randn(length, 9, generator=torch.Generator().manual_seed(seed))
        self.hits = hits
        self.num_given = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        hit = self.hits.get(self.num_given // BATCH_SIZE)
        if hit is not None and get_worker_info() is not None:
            FAULTS[hit.fault](hit)
        self.num_given += 1
        return self.x[index]


WORKER_BATCHES = {
    "sanity_check": ("validation", 0),
    "first_step": ("training", 0),
    "mid_epoch": ("training", MID_EPOCH),
    "validation": ("validation", 3),
}
"""Which batch of which loader fails in its worker. The sanity check sees but two, while the worker draws a third."""


def loader(kind: str, length: int, hits: list[Hit]) -> DataLoader[torch.Tensor]:
    """Return a loader; with a worker if it shall fail."""
    due = {batch: hit for hit in hits for name, batch in [WORKER_BATCHES[hit.moment]] if name == kind}
    samples = Samples(length, len(kind), due)
    workers = {"num_workers": 1, "prefetch_factor": 1} if due else {}
    return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=kind == "training", **workers)  # type: ignore[arg-type]


class Model(L.LightningModule):
    """Two smooth layers, so that no bit of the weights hangs on the sign of a rounding error."""

    def __init__(self, saboteur: Saboteur) -> None:
        super().__init__()
        self.saboteur = saboteur
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def _reach(self, moment: str) -> None:
        self.saboteur.reach(moment, self.saboteur.in_model)

    def setup(self, stage: str) -> None:
        """First in a run."""
        self._reach("setup")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        """Several moments are here."""
        self.saboteur.write(event="training_step", step=self.global_step, batch=batch_idx)
        for moment in moments_of_batch(self.trainer, batch_idx):
            self._reach(moment)
        if self.saboteur.is_leaving:
            time.sleep(0.1)  # it leaves after a while, which the run must last
        hidden = self.net[:2](batch[:, :8])
        if batch_idx == 0 and self.current_epoch == 0:
            hidden.register_hook(lambda _: self._reach("first_backward"))  # the last layer's gradients are there
        loss = (self.net[2](hidden)[:, 0] - batch[:, 8]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Two moments are here."""
        if self.trainer.sanity_checking:
            self._reach("sanity_check")
        elif batch_idx == VALIDATION_BATCH:
            self._reach("validation")
        self.log("val_loss", (self.net(batch[:, :8])[:, 0] - batch[:, 8]).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called on all ranks, before rank 0 writes."""
        self._reach("save")

    def on_train_epoch_end(self) -> None:
        """After validation, before its checkpoint."""
        self._reach("epoch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One with a state."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def moments_of_batch(trainer: L.Trainer, batch: int) -> Iterator[str]:
    """Yield the moments that a training batch is."""
    if trainer.current_epoch == 0:
        yield from (moment for moment, at in (("first_step", 0), ("mid_epoch", MID_EPOCH)) if batch == at)
    elif batch == SECOND_EPOCH_BATCH:
        yield "second_epoch"
    elif batch == int(trainer.num_training_batches) - 1:
        yield "last_step"


class Recorder(L.Callback):
    """Writes the weights' hash after every step; callbacks' moments are here."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        self.write = saboteur.write

    def _reach(self, moment: str) -> None:
        self.saboteur.reach(moment, self.saboteur.in_callbacks)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """First in a run."""
        self._reach("setup")

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the first validation."""
        self._reach("sanity_check")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm what waits for a recovery."""
        if trainer.current_epoch == 1 and batch_idx == ARMED_BATCH:
            self.saboteur.arm()
        for moment in moments_of_batch(trainer, batch_idx):
            self._reach(moment)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        """After the first forward."""
        self._reach("first_backward")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called once per batch."""
        self.write(
            event="batch",
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            hash=weights_hash(pl_module.state_dict()),
        )

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """In the middle of a validation."""
        if batch_idx == VALIDATION_BATCH and not trainer.sanity_checking:
            self._reach("validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The result must be the same on all ranks."""
        if not trainer.sanity_checking:
            self.write(event="validated", step=trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called on all ranks, before rank 0 writes."""
        self._reach("save")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After validation, before its checkpoint."""
        self._reach("epoch_end")


def weights_hash(state: Mapping[str, torch.Tensor]) -> str:
    """Return the same for bitwise the same weights only."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Train for two epochs, or as far as it goes."""
    out = pathlib.Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    log = (out / f"{member().replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    write(event="start", pid=os.getpid())
    if member() != "agent":
        importlib.import_module("torch._dynamo")  # the first optimizer does, for long and without a sign of progress
    saboteur = Saboteur([Hit.parse(text) for text in sys.argv[3:]], write)
    trainer = L.Trainer(
        strategy="ft_ddp",
        devices=int(sys.argv[2]),
        accelerator="cpu",
        max_epochs=2,
        logger=CSVLogger(out / "logs", name="run"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Recorder(saboteur),
            ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
        ],
    )
    training = loader("training", NUM_SAMPLES, saboteur.in_workers)
    trainer.fit(Model(saboteur), training, loader("validation", NUM_VALIDATION_SAMPLES, saboteur.in_workers))
    write(event="end", version=lightning_ft.__version__)


if __name__ == "__main__":
    main()
