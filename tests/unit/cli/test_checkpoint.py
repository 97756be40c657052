"""`lightning-ft checkpoint` on directories of this machine, in this process."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_twin import assert_same
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from mode_job import MODES, Job, assert_restored
from safetensors import safe_open
from safetensors.torch import load_file

import lightning_ft.checkpoint
from lightning_ft.checkpoint import Writer
from lightning_ft.checkpoint import export as exporting
from lightning_ft.checkpoint.replay import OPTIMIZERS
from lightning_ft.checkpoint.store import open_store
from lightning_ft.cli import main


def state(step: int) -> dict[str, Any]:
    weight = torch.full((4, 3), float(step))
    return {
        "state_dict": {"layer.weight": weight, "tied.weight": weight, "turned": weight.t()},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(4, 3)}}}],
        "global_step": step,
        exporting.RANKS: {"random": np.arange(3)},
    }


def exported(step: int) -> dict[str, Any]:
    return {name: value for name, value in state(step).items() if name != exporting.RANKS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases, 1 and 3, each with a child."""
    place = tmp_path_factory.mktemp("saved") / "run"
    writer = Writer(str(place), base_every=2)
    for step in (1, 2, 3, 4):
        writer.save(step, state(step))
    return place


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; returns its status and its JSON."""

    def call(verb: str, *arguments: object) -> tuple[int, dict[str, Any]]:
        status = main(["checkpoint", verb, *map(str, arguments), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return call


def pack(place: Path, step: int) -> Path:
    (found,) = (place / "data").glob(f"*-{step:012}/*.pack")
    return found


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_list_has_a_row_for_each(saved: Path, told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Newest first, with what each needs and its sizes; a damaged manifest is a row, and status 1."""
    status, answer = told("list", saved)
    assert status == 0
    rows = answer["checkpoints"]
    assert [(row["step"], row["depth"], row["mode"]) for row in rows] == [
        (4, 1, "lossless"),
        (3, 0, "lossless"),
        (2, 1, "lossless"),
        (1, 0, "lossless"),
    ]
    assert rows[0]["parent"] == rows[1]["key"] == rows[0]["base"]
    assert main(["checkpoint", "list", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "4", "3", "2", "1"]
    assert "needs 3" in lines[1]


def test_list_names_a_damaged_manifest(place: Path, told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are listed all the same."""
    (manifest,) = (place / "manifests").glob("*-000000000003")
    damage(manifest)
    status, answer = told("list", place)
    assert status == 1
    assert [row["step"] for row in answer["checkpoints"] if row["problem"]] == [3]
    assert main(["checkpoint", "list", str(place)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_inspect_shows_what_a_checkpoint_holds(saved: Path, told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest, that of a step, or that of a manifest's path; its tensors on request."""
    assert told("inspect", saved)[1]["step"] == 4
    key = told("inspect", saved, "--step", 2)[1]["key"]
    status, answer = told("inspect", saved / "manifests" / key)
    assert (status, answer["step"], answer["num_ranks"]) == (0, 2, 1)
    assert [(row["name"], row["shape"]) for row in answer["streams"][:2]] == [
        ("state_dict/layer.weight", [4, 3]),
        ("state_dict/turned", [3, 4]),
    ]
    assert main(["checkpoint", "inspect", str(saved), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "torch " in text
    assert "state_dict/turned" in text
    assert main(["checkpoint", "inspect", str(saved), "--step", "9"]) == 3


def test_verify_names_what_is_damaged_and_the_newest_intact(
    place: Path, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 and 1, deep or not; what was never finished is a note."""
    assert told("verify", place, "--deep")[0] == 0
    doomed = pack(place, 3)
    damage(doomed)
    (place / "data" / "0000000000-000000000002" / "a9.r0.0.pack").write_bytes(b"left over")
    for deep in ([], ["--deep"]):
        status, answer = told("verify", place, *deep)
        assert status == 1
        assert answer["newest_intact"].endswith("-000000000002")
        assert [row["is_intact"] for row in answer["checkpoints"]] == [False, False, True, True]
        assert all(str(doomed.relative_to(place)) in row["problems"][0] for row in answer["checkpoints"][:2])
        assert any("a9.r0.0.pack is of a save" in note for note in answer["notes"])
    assert main(["checkpoint", "verify", str(place)]) == 1
    text = capsys.readouterr().out
    assert "DAMAGED" in text
    assert text.splitlines()[-1].endswith("-000000000002")


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_looked_after(mode: str, tmp_path: Path, told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Inspected, verified, exported, pruned, and repaired when a checkpoint that others depend on is damaged."""
    place = tmp_path / "run"
    job = Job([open_store(str(place))] * 2, mode, base_every=4)
    states = []
    for _ in range(8):
        job.train()
        job.save()
        states.append(copy.deepcopy(job.state()))
    facts = told("inspect", place)[1]
    assert (facts["mode"], facts["depth"]) == (mode, 3 if mode in ("gradlog", "snap") else 1)
    assert mode != "gradlog" or (facts["optimizer"], facts["num_steps"], facts["num_skipped"]) == ("AdamW", 1, 0)
    assert mode != "bounded" or 0 < facts["error"] <= facts["error_bound"]
    assert told("verify", place, "--deep")[0] == 0
    target = tmp_path / "model.ckpt"
    assert told("export", place, target, "--step", 7)[0] == 0
    assert_restored(mode, torch.load(target), states[6])
    assert [key[-1] for key in told("prune", place, "--keep", "2")[1]["kept"]] == (
        list("87651") if mode in ("gradlog", "snap") else list("8751")
    )
    doomed = next((place / "data").glob("*-000000000007/a0.r1.0.pack"))
    damage(doomed)
    status, answer = told("verify", place)
    assert (status, answer["newest_intact"][-1]) == (1, "6" if mode in ("gradlog", "snap") else "8")
    for row in answer["checkpoints"]:
        assert row["is_intact"] or str(doomed.relative_to(place)) in row["problems"][0]
    assert told("repair", place, "--apply", "--claim")[0] == 0
    assert told("verify", place, "--deep")[1]["newest_intact"] == answer["newest_intact"]
    assert told("verify", place, "--deep")[0] == 0


def test_what_is_only_not_for_this_machine_is_not_called_damaged(
    tmp_path: Path, told: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify says so and why, status 1; repair has nothing to do."""
    place = tmp_path / "run"
    job = Job([open_store(str(place))], "gradlog")
    for _ in range(2):
        job.train()
        job.save()
    monkeypatch.delitem(OPTIMIZERS, "AdamW")  # type: ignore[misc]
    status, answer = told("verify", place, "--deep")
    assert (status, answer["newest_intact"][-1]) == (1, "1")
    assert [row["is_intact"] for row in answer["checkpoints"]] == [None, True]
    assert "made by the optimizer 'AdamW'" in answer["checkpoints"][0]["obstacle"]
    assert main(["checkpoint", "verify", "--deep", str(place)]) == 1
    text = capsys.readouterr().out
    assert "NOT FOR HERE" in text
    assert "DAMAGED" not in text
    assert told("repair", place)[0] == 0


def test_exported_file_is_what_was_saved(saved: Path, tmp_path: Path, told: Any) -> None:
    """For torch.load alone; of the newest, or of another step; it is not overwritten unless that is said."""
    target = tmp_path / "model.ckpt"
    assert told("export", saved, target)[1]["step"] == 4
    assert_same(torch.load(target, weights_only=True), exported(4))
    assert main(["checkpoint", "export", str(saved), str(target), "--step", "1"]) == 3
    assert_same(torch.load(target, weights_only=True), exported(4))
    assert told("export", saved, target, "--step", 1, "--force")[0] == 0
    assert_same(torch.load(target, weights_only=True), exported(1))
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt"], "no temporary file is left"
    assert exporting.RANKS not in torch.load(target)
    assert told("export", saved, target, "--force", "--all")[0] == 0
    assert exporting.RANKS in torch.load(target, weights_only=False)


def test_safetensors_have_the_model_or_all_tensors(saved: Path, tmp_path: Path, told: Any) -> None:
    """Tied and turned weights as well; the head says of which step they are."""
    target = tmp_path / "model.safetensors"
    assert told("export", saved, target)[0] == 0
    expected = state(4)["state_dict"]
    found = load_file(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with safe_open(target, "pt") as file:
        assert file.metadata()["step"] == "4"
    assert told("export", saved, tmp_path / "all.safetensors", "--all")[0] == 0
    assert "optimizer_states.0.state.0.exp_avg" in load_file(tmp_path / "all.safetensors")


def test_export_takes_the_newest_intact(place: Path, tmp_path: Path, told: Any) -> None:
    """And says how many steps that costs; one that was asked for by its step is not replaced by another."""
    damage(pack(place, 3))
    assert told("export", place, tmp_path / "model.ckpt")[1]["num_steps_lost"] == 2
    assert main(["checkpoint", "export", str(place), str(tmp_path / "other.ckpt"), "--step", "4"]) == 3
    assert not (tmp_path / "other.ckpt").exists()


@pytest.mark.parametrize("moment", ["write", "fsync", "name"])
def test_export_that_fails_leaves_nothing(
    saved: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full while the file is written, synced, or named: it is not there, nor is a part of it."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if moment == "write":
        monkeypatch.setattr(torch, "save", lambda state, file: (file.write(b"half"), fail()))
    else:
        monkeypatch.setattr(exporting, "_sync" if moment == "fsync" else "_name", fail)
    assert main(["checkpoint", "export", str(saved), str(tmp_path / "model.ckpt")]) == 3
    assert not list(tmp_path.iterdir())


def test_prune_deletes_what_is_not_kept(place: Path, told: Any) -> None:
    """First it says so, then it does it; the rest loads."""
    before = sorted(place.rglob("*"))
    status, plan = told("prune", place, "--keep", 1, "--dry-run")
    assert (status, plan["is_dry"]) == (0, True)
    assert sorted(place.rglob("*")) == before
    status, done = told("prune", place, "--keep", 1)
    assert done == {**plan, "is_dry": False}
    assert [key[-1] for key in done["deleted"]] == ["2"]
    assert_same(lightning_ft.checkpoint.load(str(place)), state(4))
    assert told("verify", place)[0] == 0


def test_repair_is_dry_unless_it_is_told_to_apply(place: Path, told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 as long as there is something to do or something stays damaged."""
    damage(pack(place, 1))
    before = sorted(place.rglob("*"))
    status, plan = told("repair", place)
    assert (status, plan["is_applied"], [row["key"][-1] for row in plan["damaged"]]) == (1, False, ["2", "1"])
    assert sorted(place.rglob("*")) == before
    assert main(["checkpoint", "repair", str(place), "--apply"]) == 0
    assert "set aside" in capsys.readouterr().out
    assert len(list((place / "aside").rglob("*.pack"))) == 2
    assert told("verify", place)[0] == told("repair", place)[0] == 0
    damage(pack(place, 3))
    status, left = told("repair", place, "--apply")
    assert status == 1, "a job that runs may build on these"
    assert len(left["left"]) == 2
    assert told("repair", place, "--claim")[1]["damaged"], "so it would"
    assert not (place / "claims" / "00000001").exists(), "it was not told to do it"
    assert told("repair", place, "--apply", "--claim", "--delete")[0] == 0
    assert told("verify", place)[1] == {"url": str(place), "checkpoints": [], "notes": [], "newest_intact": None}
    assert (place / "claims" / "00000001").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["list", "s3://"], 2, "needs a URL with a directory"),
        (["list", "nowhere://x/y"], 2, "nowhere"),
        (["list", ".", "--storage-option", "key"], 2, "expected KEY=VALUE"),
        (["list", ".", "--storage-option", "key=1"], 2, "takes no storage options"),
        (["prune", ".", "--keep", "0"], 2, "expected at least 1, got 0"),
        (["inspect", "no/such/place"], 3, "has no checkpoint"),
        (["export", "no/such/place", "x.ckpt"], 3, "there is no checkpoint"),
        (["nonsense"], 2, "invalid choice"),
    ],
)
def test_wrong_command_line_is_explained(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status tells a script whose fault it is."""
    try:
        found = main(["checkpoint", *arguments])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status
    assert message in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, and wiped; not where that is a file."""
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["checkpoint", "export", str(saved), str(tmp_path / "x.ckpt")]) == 0
    shown = capsys.readouterr().err
    assert "reading: " in shown
    assert shown.endswith("\r\033[K")


@pytest.mark.filterwarnings("default")  # Lightning's advice
def test_exported_fit_goes_on_in_plain_lightning(tmp_path: Path) -> None:
    """Without this package's strategy, callback or plugin: to bitwise the weights that its own checkpoint leads to."""

    def fit(steps: int, *callbacks: Callback, ckpt_path: str | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = BoringModel()
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=bool(callbacks),
            callbacks=list(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        assert trainer.global_step == steps
        return {name: value.clone() for name, value in model.state_dict().items()}

    place, target = tmp_path / "run", tmp_path / "model.ckpt"
    own = ModelCheckpoint(tmp_path / "own", every_n_train_steps=3)
    fit(3, lightning_ft.DeltaCheckpoint(place, every_n_train_steps=3), own)
    assert main(["checkpoint", "export", str(place), str(target)]) == 0
    assert exporting.RANKS not in torch.load(target, weights_only=True)
    expected, found = fit(6, ckpt_path=own.best_model_path), fit(6, ckpt_path=str(target))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    unlike = fit(6)
    assert not any(torch.equal(unlike[name], found[name]) for name in unlike), "the checkpoint makes a difference"
