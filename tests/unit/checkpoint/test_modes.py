"""The modes that round or replay: how numbers are rounded, and which steps a log of gradients tells."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_twin import DictStore, assert_same
from hypothesis import given
from hypothesis import strategies as st
from mode_job import Job

import lightning_ft.checkpoint
from lightning_ft.checkpoint.bounded import Rounding
from lightning_ft.checkpoint.format import hash_of
from lightning_ft.checkpoint.gradlog import MAX_PENDING, check_optimizer
from lightning_ft.checkpoint.log import Log, Step, Trained
from lightning_ft.checkpoint.manifests import read_manifest
from lightning_ft.checkpoint.records import Manifest
from lightning_ft.checkpoint.replay import OPTIMIZERS, replay
from lightning_ft.checkpoint.restore import restore
from lightning_ft.checkpoint.snap import BLOCK, SNAP_BITS, Snap, round_flat
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

# -- bounded ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
    st.sampled_from(["float32", "float64"]),
    st.floats(1e-9, 0.9),
    st.booleans(),
)
def test_no_number_is_changed_by_more_than_the_bound(bits: list[int], dtype: str, bound: float, is_near: bool) -> None:
    """For any bits, with or without a reference; what can't be rounded within it stays; what is measured is true."""
    data = np.array(bits, np.uint64).view(np.uint8)
    with np.errstate(all="ignore"):
        exact = data.view(dtype)
        reference = (exact * np.dtype(dtype).type(1 + bound / 2 if is_near else 0)).view(np.uint8)
        rounding = Rounding(bound)
        found = rounding.round(dtype, data, reference).view(dtype)
        wide, got = exact.astype(np.longdouble), found.astype(np.longdouble)
        is_same = exact.view(np.uint8).reshape(exact.size, -1) == found.view(np.uint8).reshape(exact.size, -1)
        error = np.where(is_same.all(axis=1), 0.0, np.abs(got - wide) / np.abs(wide))
    assert (error <= bound).all(), (exact, found, error)
    assert rounding.measured == pytest.approx(float(error.max()), rel=1e-6, abs=1e-16)


def test_errors_do_not_add_up_and_are_in_the_manifest() -> None:
    """After 40 saves of a drifting state each number is still as near as stated; only where it may be."""
    store = DictStore()
    writer = Writer(store, mode="bounded", error=1e-2, lossy=("net",), base_every=100)
    generator = torch.Generator().manual_seed(0)
    state = {"net": {"w": torch.randn(3000, generator=generator)}, "other": torch.randn(5, generator=generator)}
    sizes = []
    for step in range(1, 41):
        state["net"]["w"] *= 1 + 3e-3 * torch.randn(3000, generator=generator)
        manifest = writer.save(step, state)
        sizes.append(sum(pack.num_bytes for pack in manifest.packs))
        found = lightning_ft.checkpoint.load(store)
        error = ((found["net"]["w"] - state["net"]["w"]).abs() / state["net"]["w"].abs()).max()
        assert 0 < error <= 1e-2
        assert manifest.contract == "bounded"
        assert manifest.extra == {"error": {"bound": 1e-2, "measured": pytest.approx(float(error), rel=1e-4)}}
        assert_same(found["other"], state["other"])
    assert sizes[1] < 0.5 * sizes[0]  # within the bound a number stays as it was stored


@pytest.mark.parametrize("error", [0, 1, -1e-3, float("nan")])
def test_a_bound_that_is_none_is_refused(error: float) -> None:
    """It is a part of a number."""
    with pytest.raises(ValueError, match="error must be above 0"):
        Writer(DictStore(), mode="bounded", error=error)


# -- snap -------------------------------------------------------------------------------------------------------------


def rounded(values: torch.Tensor, key: object) -> torch.Tensor:
    """Return a rounded copy."""
    copied = values.clone()
    round_flat(copied, str(key))
    return copied


def test_rounding_keeps_few_bits_and_the_mean() -> None:
    """Each number goes to one of its two neighbours, so often that the mean stays; what is no number stays itself."""
    values = torch.randn(1001) * torch.logspace(-40, 30, 1001)
    found = torch.stack([rounded(values, key) for key in range(2000)])
    assert not (found.view(torch.int32) & ((1 << (23 - SNAP_BITS)) - 1)).any()
    normal = values.abs() > 1e-37
    assert ((found - values).abs() <= 0.125 * values.abs())[:, normal].all()
    assert ((found.double().mean(0) - values).abs() <= 0.01 * values.abs())[normal].all()
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 0.0, -0.0])
    odd = torch.cat([odd, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    assert torch.equal(rounded(odd, 0).view(torch.int32), odd.view(torch.int32))


def test_errors_of_neighbours_and_of_blocks_have_nothing_to_do_with_each_other() -> None:
    """Of 10 blocks and a bit: what is rounded up in one place says nothing of the next, nor of the next block's."""
    values = torch.full((10 * BLOCK + 5,), 1.0625)
    errors = (rounded(values, 0) - values)[: 10 * BLOCK].double()
    noise = 4 / (10 * BLOCK) ** 0.5
    assert float(errors.mean().abs() / errors.std()) < noise
    for distance in (1, 2, 3, 1000, BLOCK, BLOCK + 1, 3 * BLOCK):
        product = errors[distance:] * errors[:-distance]
        assert float((product.mean() / errors.var()).abs()) < 2 * noise, distance
    assert torch.equal(rounded(values, 0), rounded(values, 0))
    assert not torch.equal(rounded(values, 0), rounded(values, 1))


def test_how_numbers_are_rounded_stays() -> None:
    """A run that goes on with a newer version, or on another machine, rounds as it would have done."""
    values = torch.arange(1, 2 * BLOCK + 8).float() / 7 - 9000
    found = rounded(values, "0 20 3 1")
    assert hash_of(found.numpy().data).hex() == "deb2fabe087c80947b556188a5026973"


@pytest.mark.parametrize("layout", ["rows", "channels last", "gaps"])
def test_each_order_in_memory_is_rounded(layout: str) -> None:
    """Of a parameter and its averages, whatever their strides."""
    shape = (2, 3, 4, 5)
    tensor = torch.randn(2, 3, 4, 10)[..., ::2] if layout == "gaps" else torch.randn(shape)
    if layout == "channels last":
        tensor = tensor.to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(tensor)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    snap = Snap()
    snap.begin([optimizer])
    begun = parameter.detach().clone()
    parameter.grad = torch.randn(shape)
    optimizer.step()
    average = torch.empty_like(tensor).copy_(torch.randn(shape))
    optimizer.state[parameter]["momentum_buffer"] = average
    before, moved = average.clone(), parameter.detach() - begun
    snap.snap([optimizer], 10)
    for exact, found in ((before, average), (moved, parameter.detach() - begun)):
        assert ((found - exact).abs() <= 0.126 * exact.abs() + 1e-6).all()
        assert not torch.equal(found, exact)


def trained(seed: int = 0, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small net and its optimizer."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, **options)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take a step."""
    optimizer.zero_grad()
    net(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def test_ranks_round_alike_without_touching_the_random_numbers() -> None:
    """Two ranks with the same state have the same afterwards; another seed or step rounds otherwise."""
    runs = []
    for seed, step in ((0, 5), (0, 5), (1, 5), (0, 6)):
        net, optimizer = trained()
        snap = Snap(seed)
        snap.begin([optimizer])
        train(net, optimizer, 0)
        before = torch.get_rng_state()
        snap.snap([optimizer], step)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append([value.clone() for value in (*net.parameters(), *optimizer.state[net[0].weight].values())])
    assert_same(runs[0], runs[1])
    assert all(not torch.equal(runs[0][0], other[0]) for other in runs[2:])


def test_an_interrupted_run_rounds_as_if_it_were_not() -> None:
    """What begins with what one rounding has left has the same after the next; and the rounded is less to store."""
    whole_net, whole = trained()
    snap, store = Snap(), DictStore()
    writer = Writer(store, mode="snap")
    snap.begin([whole])
    for step in range(1, 41):
        train(whole_net, whole, step)
        if step % 10 == 0:
            snap.snap([whole], step)
            writer.save(step, {"net": whole_net.state_dict(), "optimizer": whole.state_dict()})
        if step == 20:
            net, optimizer = trained(seed=7)
            found = lightning_ft.checkpoint.load(store)
            net.load_state_dict(found["net"])
            optimizer.load_state_dict(found["optimizer"])
            resumed = Snap()
            resumed.begin([optimizer])
        elif step > 20:
            train(net, optimizer, step)
            if step % 10 == 0:
                resumed.snap([optimizer], step)
        assert step < 20 or all(map(torch.equal, net.state_dict().values(), whole_net.state_dict().values()))
    found = lightning_ft.checkpoint.load(store)
    assert_same(found["net"], copy.deepcopy(whole_net.state_dict()))
    manifests = [read_manifest(store, key)[0] for key in lightning_ft.checkpoint.manifests.published_keys(store)]
    assert [manifest.depth for manifest in manifests] == [3, 2, 1, 0]
    assert "add-blosc2" in {frame.codec for frame in manifests[0].frames}


def test_who_has_forgotten_leaves_the_parameters_exact_once() -> None:
    """The averages are rounded all the same."""
    net, optimizer = trained()
    snap = Snap()
    snap.begin([optimizer])
    train(net, optimizer, 0)
    snap.forget()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    snap.snap([optimizer], 10)
    assert all(map(torch.equal, before, net.parameters()))
    assert not (optimizer.state[net[0].weight]["exp_avg"].view(torch.int32) & 0xFFFF).any()
    train(net, optimizer, 1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    snap.snap([optimizer], 20)
    assert not torch.equal(before[0], net[0].weight)


# -- gradlog ----------------------------------------------------------------------------------------------------------


class Run(Job):
    """A training with a log, and checkpoints of it."""

    def __init__(self, optimizer: str = "AdamW", num_ranks: int = 1, **options: Any) -> None:
        self.store = DictStore()
        self.others: list[torch.Tensor] = []
        super().__init__([self.store] * num_ranks, "gradlog", base_every=50)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
        self.forget()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "others": self.others}

    def train(self, max_norm: float | None = None) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.99
        super().train(max_norm)

    def save(self) -> Manifest:
        manifest = super().save()
        assert_same(restore(self.store, key=manifest.key).state, copy.deepcopy(self.state()))
        return manifest


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_replayed_bit_for_bit(optimizer: str, foreach: bool) -> None:
    """With each optimizer, by two ranks, clipped or not, one step or several between two checkpoints."""
    run = Run(optimizer, 2, foreach=foreach, **({"momentum": 0.9, "nesterov": True} if optimizer == "SGD" else {}))
    run.train()
    run.save()
    assert run.reason == "there is no checkpoint yet"
    for num_steps in (1, 3):
        for number in range(num_steps):
            run.train(max_norm=0.1 if number % 2 == 0 else None)
        manifest = run.save()
        assert (manifest.depth > 0, run.reason) == (True, None)
    assert manifest.extra["optimizer"] == optimizer
    assert [step["clip"] is None for step in manifest.extra["steps"]] == [False, True, False]


def moved(run: Run) -> None:
    """Give a weight other memory."""
    run.net[0].weight.data = run.net[0].weight.data.clone()


def grown(run: Run) -> None:
    """Train another parameter."""
    run.net.register_parameter("more", torch.nn.Parameter(torch.ones(3)))
    run.optimizer.add_param_group({"params": [run.net.more]})


def stepped_twice(run: Run) -> None:
    """Step without being asked to."""
    for log in run.logs:
        log.stepped()


def written(run: Run) -> None:
    """Use an option that can't be written down."""
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    run.train()


def overflowing(run: Run) -> None:
    """Take more steps than are held."""
    for _ in range(MAX_PENDING + 1):
        run.train()


def missed(run: Run) -> None:
    """Take a step that nobody tells of."""
    run.step += 1


@pytest.mark.parametrize(
    ("interfere", "reason"),
    [
        (lambda run: run.net[0].weight.data.add_(1), "changed after the optimizer's step"),
        (lambda run: (run.net[0].weight.data.add_(1), run.train()), "changed between two optimizer steps"),
        (lambda run: run.optimizer.state[run.net[0].weight]["exp_avg"].mul_(0), "changed after the optimizer's step"),
        (lambda run: run.optimizer.state[run.net[0].weight]["exp_avg"].data.mul_(2), "changed after the optimizer's"),
        (
            lambda run: run.optimizer.state[run.net[2].bias]["exp_avg_sq"][1:].neg_(),
            "changed after the optimizer's step",
        ),
        (lambda run: run.net[0].weight.detach().numpy().put(50, 3.0), "changed after the optimizer's step"),
        (moved, "other parameters"),
        (grown, "other parameters"),
        (stepped_twice, "that Lightning did not ask for"),
        (written, "an option"),
        (overflowing, "held in memory"),
        (missed, "of 2 steps since the last checkpoint 1 are known"),
    ],
)
def test_what_no_log_tells_becomes_a_base(interfere: Callable[[Run], object], reason: str) -> None:
    """Whoever changes something besides the optimizer costs a base; afterwards there is a log again."""
    run = Run()
    run.train()
    run.save()
    run.train()
    interfere(run)
    assert run.save().parent is None
    assert reason in str(run.reason)
    run.optimizer.param_groups[0]["lr"] = 0.01
    run.train()
    run.save()
    run.train()
    assert run.save().parent is not None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_that_come_and_go_besides_do_not_end_a_log(num_ranks: int) -> None:
    """If what the optimizer owns stays where it is: a fit's place in an epoch is there in its middle alone."""
    run = Run(num_ranks=num_ranks)
    run.train()
    run.save()
    for others in ([torch.arange(3)], [], [torch.arange(3)], [torch.arange(5), torch.arange(4)]):
        run.others = others
        run.train()
        manifest = run.save()
        assert (manifest.parent is None) == (run.reason is not None)
        assert num_ranks > 1 or manifest.parent is not None


def test_steps_that_a_scaler_leaves_out_are_not_replayed() -> None:
    """Their gradients are not stored; those before and after are."""
    run = Run()
    run.train()
    run.save()
    run.train()
    run.step += 1
    run.logs[0].stepping()
    run.train()
    manifest = run.save()
    assert run.reason is None
    assert [step["skipped"] for step in manifest.extra["steps"]] == [False, True, False]
    assert {frame.slot for frame in manifest.frames} == {0, 1, 3}


def test_a_norm_that_is_not_finite_is_no_way_to_clip() -> None:
    """Then the gradients are taken down as they are afterwards."""
    run = Run()
    run.train()
    run.save()
    run.logs[0].stepping()
    assert not run.logs[0].clipped(torch.tensor(float("inf")), 1.0)
    assert run.logs[0].num_pending == 0


class Own(torch.optim.AdamW):
    """A user's, that rounds otherwise."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data *= 1 + 2**-22


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "LBFGS"),
        (Own, "test_modes.Own"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), "AdamW with fused=True"),
        (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "Adam with differentiable=True"),
    ],
)
def test_optimizers_that_can_not_be_replayed_are_refused(make: Callable[[Any], Any], message: str) -> None:
    """By name: what rounds otherwise, takes closures, or may do anything."""
    with pytest.raises(ValueError, match=message):
        check_optimizer(make(torch.nn.Linear(2, 2).parameters()))


def test_what_this_machine_can_not_replay_is_said() -> None:
    """An optimizer that is not known, a device that is not there: no damage, and no older checkpoint."""
    step = Step(({},), None, is_skipped=False, gradients=())
    for optimizer, device in (("LBFGS", "cpu"), ("AdamW", "mps")):
        log = Log(optimizer, device, "", ((Trained(0, {}),),), (step,))
        with pytest.raises(UnsupportedCheckpointError, match="LBFGS" if device == "cpu" else "mps"):
            replay(log, (), (), {}, "manifests/x")


# -- damage -----------------------------------------------------------------------------------------------------------


def bounded(store: DictStore) -> list[Any]:
    """Write a base and a difference. Returns: What is restored of each."""
    writer, states = Writer(store, mode="bounded"), []
    values = torch.linspace(1, 2, 40)
    for step in (1, 2):
        writer.save(step, {"w": values * step})
        states.append(lightning_ft.checkpoint.load(store))
    return states


def snapped(store: DictStore) -> list[Any]:
    """Write a base and a rounded difference."""
    net, optimizer = trained()
    writer, snap, states = Writer(store, mode="snap"), Snap(), []
    snap.begin([optimizer])
    for step in (1, 2):
        train(net, optimizer, step)
        snap.snap([optimizer], step)
        writer.save(step, {"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        states.append(lightning_ft.checkpoint.load(store))
    return states


def logged(store: DictStore) -> list[Any]:
    """Write a base and a log."""
    run, states = Run(), []
    for _ in (1, 2):
        run.train()
        run.save()
        states.append(lightning_ft.checkpoint.load(run.store))
    store.files.update(run.store.files)
    return states


@pytest.mark.parametrize("write", [bounded, snapped, logged])
def test_flipped_bits_and_truncations_are_detected(
    write: Callable[[DictStore], list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """In each kind of frame: what is restored was saved, and verification names the file."""
    caplog.set_level(logging.ERROR)
    store = DictStore()
    states = write(store)
    assert read_manifest(store, lightning_ft.checkpoint.manifests.published_keys(store)[0])[0].depth == 1
    for path, data in list(store.files.items()):
        if "000000000002" not in path or path.endswith("footer"):
            continue
        for bit in range(0, 8 * len(data), len(data) // 12 | 1):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            store.files[path] = bytes(damaged)
            assert any(path in text for verdict in lightning_ft.checkpoint.verify(store) for text in verdict.problems)
            with pytest.raises(CheckpointDamagedError):
                restore(store, key=restore_key(store))
        store.files[path] = data[: len(data) // 2]
        assert_same(lightning_ft.checkpoint.load(store), states[0])
        store.files[path] = data
    assert_same(lightning_ft.checkpoint.load(store), states[1])


def restore_key(store: DictStore) -> Any:
    """Return the newest key."""
    return lightning_ft.checkpoint.manifests.published_keys(store)[0]
