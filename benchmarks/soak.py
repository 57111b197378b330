"""A long run with random faults: does memory grow, is a thread, a file or a group left over?

    python benchmarks/soak.py [--steps 3000] [--ranks 4]

CPD-SGDM on a tiny model, under a GradScaler that is switched on and off; overflows, gradients that are not finite,
empty batches and unused parameters on random ranks; an exact average and a checkpoint now and then. What is compared
is the state after a fifth of the steps with that at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import distributed_c10d

from decent_opt import CPDSGDM, checkpoint
from decent_opt.testing import run_ranks


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    resident: int
    files: int
    threads: int
    python_threads: int
    groups: int

    @classmethod
    def now(cls) -> Held:
        """Of this process; resident memory in bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            threading.active_count(),
            len(distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
        )


def soak(rank: int, steps: int, folder: str) -> tuple[Held, Held, int, bool]:
    """(held after a fifth of the steps, held at the end, faults, are all parameters finite)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = CPDSGDM(model.parameters(), lr=0.02, momentum=0.9, model=model, period=2, timeout=60)
    torch.manual_seed(1 + rank)
    optimizer.monitor.records = type(optimizer.monitor.records)(maxlen=100)
    scaler, plain = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10), random.Random(rank)
    faults, early = 0, Held.now()
    for step in range(1, steps + 1):
        scaled, fault = step // 50 % 2 == 0, plain.choice(["none"] * 30 + ["bad", "empty", "unused"])
        data = torch.randn(0 if fault == "empty" else 8, 16)
        optimizer.zero_grad()
        loss = model(data).square().sum() / 8
        (scaler.scale(loss) if scaled else loss).backward()
        if fault == "bad":
            model[2].weight.grad[0, 0] = float("nan")
        if fault == "unused":
            model[2].weight.grad = None
        faults += fault != "none"
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if step % 200 == 0:
            optimizer.consensus_()
            checkpoint.async_save(f"{folder}/{step}", model=model, optimizer=optimizer).result()
            shutil.rmtree(f"{folder}/{step}/rank-{rank}-of-{dist.get_world_size()}")
        if step == max(steps // 5, 200):  # after the first checkpoint, whose thread stays
            early = Held.now()
    late = Held.now()
    optimizer.consensus_()
    optimizer.close()
    return early, late, faults, all(bool(p.isfinite().all()) for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(soak, arguments.ranks, args=(arguments.steps, folder), timeout=900)
    table = Table("rank", "faults", "finite", "resident MB", "growth", "files", "threads", "process groups")
    for rank, (early, late, faults, finite) in enumerate(results):
        growth = late.resident / early.resident - 1
        held = [
            f"{a} -> {b}" for a, b in zip(list(vars(early).values())[1:3], list(vars(late).values())[1:3], strict=True)
        ]
        groups = f"{early.groups} -> {late.groups}"
        table.add_row(
            str(rank), str(faults), str(finite), f"{late.resident / 1e6:.0f}", f"{growth:+.1%}", *held, groups
        )
    Console().print(table)


if __name__ == "__main__":
    main()
