"""What comparing the gradients costs: steps with `verify_every_n_steps` 10 and 1, in turns with steps without.

    python benchmarks/verification.py [--millions 25] [--ranks 3] [--rounds 40] [--state]

All three are done by the same processes, in slices of ten steps, in an order that changes with each round: so they
see the same machine, however it changes. The ratio is taken within each round; the table shows the median and the
quartiles of these, for the time of a slice and for the processor time that all ranks have used in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import lightning_ft

KINDS = {"off": 0, "10": 10, "1": 1}
"""Name and `verify_every_n_steps`."""

NUM_STEPS = 10
_WIDTH = 1600


def member(out: pathlib.Path, millions: int, rounds: int, *, has_state: bool) -> None:
    """Take the steps; rank 0 writes what each slice took."""
    torch.set_num_threads(1)
    dist.init_process_group("ft")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(max(1, round(millions * 1e6 / _WIDTH**2)))]
    model = lightning_ft.ft_ddp(torch.nn.Sequential(*layers))
    # The cheapest optimizer, so that comparing has the largest share; with state, one that has some.
    make = torch.optim.AdamW if has_state else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-4)
    model.watch_optimizers(optimizer)
    inputs = torch.randn(24, _WIDTH)
    settings = model.verifier._settings

    def take_slice(kind: str) -> tuple[float, float]:
        every = KINDS[kind]
        model.verifier._settings = dataclasses.replace(
            settings, verify_every_n_steps=every, verify_state_every_n_steps=every * has_state
        )
        dist.barrier()
        started_s, used_s = time.perf_counter(), time.process_time()
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        used = torch.tensor([time.process_time() - used_s], dtype=torch.float64)
        dist.barrier()
        took_s = time.perf_counter() - started_s
        dist.all_reduce(used)
        return took_s, float(used)

    take_slice("1")
    names = list(KINDS)
    with (out / "slices.jsonl").open("w") as file:
        for number in range(rounds):
            order = names[number % 3 :] + names[: number % 3]
            found = {kind: take_slice(kind) for kind in (order if number % 2 else order[::-1])}
            if dist.get_rank() == 0:
                file.write(json.dumps(found) + "\n")
                file.flush()
    dist.destroy_process_group()


def _quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    """Start the ranks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=25, help="of parameters")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--state", action="store_true", help="compare parameters and AdamW's state as well")
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        member(arguments.out, arguments.millions, arguments.rounds, has_state=arguments.state)
        return
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--out", directory, "--millions", str(arguments.millions), "--rounds", str(arguments.rounds)]
        command = [sys.executable, "-m", "lightning_ft.cli", "run", "--nproc-per-node", str(arguments.ranks)]
        command += [__file__, *flags, *(["--state"] * arguments.state)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (pathlib.Path(directory) / "slices.jsonl").read_text().splitlines()]
    print("| verify_every_n_steps | step | time, ratio (quartiles) | processor time, ratio (quartiles) |")
    print("|---|---|---|---|")
    for kind in KINDS:
        took_ms = statistics.median(row[kind][0] for row in rows) / NUM_STEPS * 1e3
        ratios = [_quartiles([row[kind][which] / row["off"][which] for row in rows]) for which in (0, 1)]
        print(f"| {kind} | {took_ms:.1f} ms | {ratios[0]} | {ratios[1]} |")


if __name__ == "__main__":
    main()
