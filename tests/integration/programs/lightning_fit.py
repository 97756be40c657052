"""A small Lightning run that writes down everything a checker needs.

    lightning_fit.py OUT [--strategy ft_ddp|ddp] [--devices N] [--num-nodes N] [--case NAME]... [--epochs N]
                     [--workers N] [--logger csv|tensorboard] [--test] [--predict] [--skip-fit] [--hold]
                     [--save-every N] [--resume CHECKPOINT] [--wanted N] [--ahead BYTES]
                     [--monitor]

Cases train one after the other in the same processes: `adamw`, `batchnorm`, `accumulate`, `manual`, `hook`. Each member
appends JSON lines to OUT/<node>-<slot>.jsonl; rank 0 saves OUT/<case>.pt. With --hold the batches are slow while ranks
are missing, so that these are back before the fit ends; with --wanted, of so many, for whom all wait in the sixth batch
until there is a file OUT/go. With --save-every there is an OUT/saved/step=<N>.ckpt
after every N steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import time
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft


def dataset(length: int, seed: int) -> TensorDataset:
    """Return a classification problem that a linear rule nearly solves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1), torch.arange(length))


class Seen(torchmetrics.Metric):
    """Which samples were seen, in a list and in a sum: the sum of their numbers if each was seen once, else -1."""

    indices: list[torch.Tensor]
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("indices", [], dist_reduce_fx="cat")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, indices: torch.Tensor) -> None:
        """Note the samples of a batch."""
        self.indices.append(indices)
        self.count += len(indices)

    def compute(self) -> torch.Tensor:
        """Compare what the two states say."""
        seen = torchmetrics.utilities.dim_zero_cat(self.indices)
        is_whole = seen.unique().numel() == seen.numel() == self.count
        return seen.sum().float() if is_whole else torch.tensor(-1.0)


class Classifier(L.LightningModule):
    """Two layers; `case` chooses what is special."""

    def __init__(self, case: str, write: Any) -> None:
        super().__init__()
        self.case = case
        self.write = write
        norm = torch.nn.BatchNorm1d(64) if case == "batchnorm" else torch.nn.Identity()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), norm, torch.nn.ReLU(), torch.nn.Linear(64, 4))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.seen = Seen()
        self.automatic_optimization = case != "manual"
        self.factor = 1.0

    def on_train_epoch_start(self) -> None:
        """Set what no state tells, and log what no batch logs."""
        if self.case == "batchnorm":
            self.factor = 1 / (1 + self.current_epoch)
            self.log("factor", self.factor, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Write which samples were used; the reduction happens in backward."""
        x, y, index = batch
        self.write(event="training_step", case=self.case, step=self.global_step, batch=batch_idx, index=index.tolist())
        loss = self.factor * torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        if self.case == "batchnorm":
            self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if not self.automatic_optimization:
            first, second = self.optimizers()  # type: ignore[misc]
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            first.step()
            second.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log a synchronised loss, a torchmetrics metric, and what tells whether each sample is in them once."""
        x, y, index = batch
        self.log("val_index", index.sum().float(), reduce_fx="sum", sync_dist=True)
        logits = self.net(x)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.accuracy(logits, y)
        self.log("val_accuracy", self.accuracy)
        self.seen.update(index)
        self.log("val_seen", self.seen)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """As validation."""
        x, y, index = batch
        self.log("test_index", index.sum().float(), reduce_fx="sum", sync_dist=True)
        self.accuracy(self.net(x), y)
        self.log("test_accuracy", self.accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return which samples were seen."""
        return batch[2]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """Return AdamW, or SGD with momentum; two for manual optimization."""
        if self.case == "manual":
            half = list(self.net[0].parameters())
            rest = list(self.net[3].parameters())
            return [torch.optim.SGD(half, lr=0.05), torch.optim.AdamW(rest, lr=0.01)]
        if self.case == "batchnorm":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def make_strategy(name: str, case: str) -> str | Strategy:
    """Return the strategy; with a communication hook for case `hook`."""
    if case != "hook":
        return name
    kind = DDPStrategy if name == "ddp" else lightning_ft.FaultTolerantDDPStrategy
    return kind(ddp_comm_hook=default_hooks.bf16_compress_hook)


class Recorder(L.Callback):
    """Writes the weights' hash after every step, and what the trainer thinks of it."""

    def __init__(self, write: Any, num_wanted: int, go: pathlib.Path | None) -> None:
        self.write = write
        self.num_wanted = num_wanted
        self.go = go

    def on_train_batch_start(self, trainer: L.Trainer, module: Classifier, batch: Any, batch_idx: int) -> None:
        """Give whoever is missing time to come back."""
        if trainer.world_size < self.num_wanted:
            time.sleep(0.1)
        while self.go is not None and trainer.global_step == 5 and not self.go.exists():
            time.sleep(0.01)

    def on_membership_change(
        self, trainer: L.Trainer, module: Classifier, old_view: tuple[str, ...], new_view: tuple[str, ...]
    ) -> None:
        """Called before the first batch of others."""
        size = trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum")
        self.write(event="change", step=trainer.global_step, old=old_view, new=new_view, size=int(size))

    def on_fit_start(self, trainer: L.Trainer, module: Classifier) -> None:
        """Called in members only: the agent never gets here."""
        self.write(event="start", pid=os.getpid(), version=lightning_ft.__version__)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Classifier, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called once per batch."""
        digest = hashlib.sha256()
        for parameter in module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self.write(
            event="batch",
            case=module.case,
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            hash=digest.hexdigest()[:16],
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            rate=trainer.optimizers[0].param_groups[0]["lr"],
        )

    def on_validation_end(self, trainer: L.Trainer, module: Classifier) -> None:
        """Write the metrics, which must be the same on all ranks."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        self.write(event="validated", case=module.case, step=trainer.global_step, metrics=metrics)


def main() -> None:
    """Train each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--strategy", default="ft_ddp")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--case", action="append")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--logger", default="csv")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--skip-fit", action="store_true")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume")
    parser.add_argument("--ahead", type=int, default=0, help="bytes of the state that a step sends ahead to joiners")
    parser.add_argument("--wanted", type=int, default=0)
    parser.add_argument("--monitor", action="store_true")
    arguments = parser.parse_args()
    if arguments.ahead:
        from ahead import send_ahead

        send_ahead(arguments.ahead)
    member = os.environ.get("LIGHTNING_FT_MEMBER", f"0/{os.environ.get('LOCAL_RANK', '0')}")
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    torch.set_num_threads(1)
    for case in arguments.case or ["adamw"]:
        L.seed_everything(7, verbose=False)
        make_logger = CSVLogger if arguments.logger == "csv" else TensorBoardLogger
        monitor = lightning_ft.FaultToleranceMonitor()
        trainer = L.Trainer(
            strategy=make_strategy(arguments.strategy, case),
            devices=arguments.devices,
            num_nodes=arguments.num_nodes,
            accelerator="cpu",
            max_epochs=arguments.epochs,
            accumulate_grad_batches=3 if case == "accumulate" else 1,
            logger=make_logger(arguments.out / "logs", name=case),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                Recorder(
                    write,
                    arguments.wanted or (arguments.devices if arguments.hold else 0),
                    arguments.out / "go" if arguments.wanted else None,
                ),
                ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
                *[
                    ModelCheckpoint(arguments.out / "saved", "{step}", every_n_train_steps=number, save_top_k=-1)
                    for number in [arguments.save_every]
                    if number
                ],
                *([monitor] if arguments.monitor else []),
            ],
        )
        module = Classifier(case, write)
        loader = DataLoader(
            dataset(480, 1),
            batch_size=8,
            shuffle=True,
            num_workers=arguments.workers,
            persistent_workers=arguments.workers > 0,
        )
        if not arguments.skip_fit:
            trainer.fit(module, loader, DataLoader(dataset(120, 2), batch_size=10), ckpt_path=arguments.resume)
        if arguments.monitor:
            write(event="monitored", **monitor.values())
        if arguments.test:
            results = trainer.test(module, DataLoader(dataset(120, 3), batch_size=10), verbose=False)
            write(event="tested", case=case, results=results)
        if arguments.predict:
            predictions = trainer.predict(module, DataLoader(dataset(120, 4), batch_size=10)) or []
            write(event="predicted", case=case, index=torch.cat(predictions).tolist())  # type: ignore[arg-type]
        if trainer.is_global_zero and not arguments.skip_fit:
            torch.save(module.state_dict(), arguments.out / f"{case}.pt")
            best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
            write(event="saved", case=case, best=best, keys=len(torch.load(best, weights_only=True)["state_dict"]))
    write(event="end", rank=trainer.global_rank)


if __name__ == "__main__":
    main()
