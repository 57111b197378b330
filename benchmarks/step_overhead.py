"""What a step between two rounds costs over the bare optimizer's step: median ratio of pairs timed in one run.

    python benchmarks/step_overhead.py [--pairs 300]

Bare and decentralised optimizer step the same transformer-shaped parameters in turn, on one thread of a loopback
world of two, with a period that never comes.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from decent_opt import Decentralized
from decent_opt.testing import run_ranks

SIZES = {"1M": (128, 5), "25M": (512, 8)}  # width, blocks
BASES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def parameters(width: int, blocks: int) -> list[nn.Parameter]:
    """The tensors of a transformer without embeddings: 12 d^2 + 13 d elements and 12 tensors per block."""
    d = width
    shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    made = [nn.Parameter(torch.randn(shape)) for _ in range(blocks) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def measure(rank: int, size: str, base: str, pairs: int, done: threading.Event) -> tuple[float, float]:
    """Rank 0 returns (median seconds of the bare step, median ratio); rank 1 only joins the construction."""
    ours = Decentralized(BASES[base](parameters(*SIZES[size])), period=10**9)
    if rank != 0:
        done.wait()
        return 0.0, 0.0
    bare = BASES[base](parameters(*SIZES[size]))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs + 10):
        for wrapped in (pair % 2 == 0, pair % 2 == 1):  # the order alternates, and so does what the caches hold
            optimizer = ours if wrapped else bare
            began = time.perf_counter()
            optimizer.step()
            if pair >= 10:
                seconds[wrapped].append(time.perf_counter() - began)
    done.set()
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return statistics.median(seconds[False]), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="timed pairs of steps per row")
    arguments = parser.parse_args()
    table = Table("parameters", "optimizer", "bare step, ms", "ratio", title="step between rounds / bare step")
    for size in SIZES:
        for base in BASES:
            pairs = arguments.pairs if size == "1M" else max(20, arguments.pairs // 5)
            seconds, ratio = run_ranks(measure, 2, "loopback", (size, base, pairs, threading.Event()), timeout=600)[0]
            table.add_row(size, base, f"{1e3 * seconds:.2f}", f"{ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
