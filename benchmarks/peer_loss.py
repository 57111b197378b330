"""Workers are killed, and the others go on: how long they stand still, and what the loss is in the end.

    python benchmarks/peer_loss.py [--ranks 8]

Each rank of 8 is killed in turn, then two one after the other; next to it an undisturbed run of the 7 others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from decent_opt import Decentralized
from decent_opt.testing import RankFailed, run_ranks, seeded

TIMEOUT = 3.0
STEPS = 150


def problem(rank: int, step: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Noisy linear targets; every rank has the same truth and inputs of its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 8, generator=generator)
    truth = torch.linspace(-1, 1, 8)
    return x, x @ truth + 0.1 * torch.randn(rows, generator=generator)


def train(rank: int, folder: str, deaths: dict[int, int], options: dict[str, Any]) -> None:
    """deaths: rank -> the step in which it is killed, or -step: stopped. The others write down how it went."""
    torch.set_num_threads(1)
    with seeded(0):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = Decentralized(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model=model,
        **{"period": 2, "timeout": TIMEOUT, **options},
    )
    longest = 0.0
    for step in range(STEPS):
        if deaths.get(rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if deaths.get(rank) == -step and step:
            subprocess.Popen(["sh", "-c", f"sleep {4 * TIMEOUT}; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        x, y = problem(rank, step)
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        began = time.monotonic()
        optimizer.step()
        longest = max(longest, time.monotonic() - began)
    optimizer.consensus_()
    x, y = problem(99, 0, rows=1000)
    loss = float((model(x).squeeze(1) - y).square().mean().detach())
    kinds = [record.kind for record in optimizer.monitor.records]
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    told = {"loss": loss, "longest": longest, "kinds": kinds, "finite": finite, "size": optimizer.rounds.transport.size}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def told(folder: str, ranks: range) -> list[dict[str, Any]]:
    """What the ranks that are left have written down, in their order."""
    files = [Path(folder, f"{rank}.json") for rank in ranks]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    n = parser.parse_args().ranks
    columns = ("killed", "go on", "longest step, s", "loss", "loss of fewer, undisturbed")
    table = Table(*columns, title=f"{n} ranks, timeout {TIMEOUT:g} s")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(train, n - 1, "loopback", (folder, {}, {"topology": "ring"}))
        undisturbed = told(folder, range(n))[0]["loss"]
    for deaths in [*({rank: 21} for rank in range(n)), {0: 11, n // 2: 31}]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(train, n, args=(folder, deaths, {"topology": "ring", "on_peer_loss": "continue"}))
            except RankFailed as error:
                if sorted(error.reports) != sorted(deaths):
                    raise
            left = told(folder, range(n))
        longest = max(one["longest"] for one in left)
        losses = {one["loss"] for one in left}
        assert len(losses) == 1
        numbers = (f"{longest:.1f}", f"{losses.pop():.5f}", f"{undisturbed:.5f}")
        table.add_row(str(sorted(deaths)), str(left[0]["size"]), *numbers)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
