"""CPD-SGDM against its matrix twin after every step: compressors, both orders, options, several tensors and buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decent_opt import CPDSGDM, PDSGDM
from decent_opt.compression import Key, Layout, make_compressor, row_of
from decent_opt.simulation import SGDM, CompressedTwin, NoisyQuadratics, noisy_quadratics
from decent_opt.testing import RankPool, run_ranks
from decent_opt.topology import make_topology

SHAPES = [(90, 50), (7,), (), (64, 65), (33,)]
DIMENSION = sum(torch.Size(shape).numel() for shape in SHAPES)
SPECS = [
    "identity",
    "bf16",
    "fp16",
    "sign",
    "sign:chunk=100",
    "topk:share=0.1",
    "topk-global:share=0.1",
    "random-blocks:block=64",
    "randk",
    "randk:share=0.3,unbiased=yes",
    "int8",
    "int4",
]


class Diagonal(NoisyQuadratics):
    """Diagonal curvature, so that 9000 coordinates cost nothing: `curvature` is (n, d)."""

    def gradient(self, worker: int, x: Tensor, step: int) -> Tensor:
        g = self.curvature[worker] * (x.to(self.centre) - self.centre[worker])
        return (g + self.noise(worker, step)).type_as(x)


def problem(n: int) -> Diagonal:
    generator = torch.Generator().manual_seed(1)
    curvature = 0.1 + 0.9 * torch.rand(n, DIMENSION, generator=generator, dtype=torch.float64)
    centre = torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64)
    return Diagonal(curvature, centre, sigma=0.5)


def start() -> Tensor:
    return torch.randn(DIMENSION, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def train(rank: int, n: int, steps: int, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    """All parameters after each step, (steps, d)."""
    task = problem(n)
    cuts = [torch.Size(shape).numel() for shape in SHAPES]
    parameters = [
        torch.nn.Parameter(x.reshape(shape).to(dtype)) for x, shape in zip(start().split(cuts), SHAPES, strict=True)
    ]
    optimizer = CPDSGDM(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, **options)
    rows = []
    for step in range(1, steps + 1):
        x = torch.cat([p.detach().reshape(-1) for p in parameters])
        for p, g in zip(parameters, task.gradient(rank, x, step).split(cuts), strict=True):
            p.grad = g.reshape(p.shape).clone()
        optimizer.step()
        rows.append(torch.cat([p.detach().reshape(-1) for p in parameters]))
    optimizer.close()
    return torch.stack(rows)


def operator(spec: str, dtype: torch.dtype, seed: int = 0) -> Callable[[int, Tensor, int], Tensor]:
    """Q on the vector of all parameters as one bucket sees it: large matrices first, then what is small."""
    compressor = make_compressor(spec)
    cuts = [torch.Size(shape).numel() for shape in SHAPES]
    order = sorted(range(len(SHAPES)), key=lambda i: row_of(SHAPES[i]) == 1)
    layout = Layout.join([(cuts[i], row_of(SHAPES[i])) for i in order])

    def q(worker: int, x: Tensor, round: int) -> Tensor:
        pieces = x.to(dtype).split(cuts)
        flat = torch.cat([pieces[i] for i in order])
        key = Key(seed, round, worker, order[0] << 40)
        message = torch.empty(compressor.nbytes(layout, dtype), dtype=torch.uint8)
        compressor.encode(flat, layout, message, key)
        decoded = torch.zeros_like(flat)
        compressor.decode_add_(decoded, layout, message, compressor.damping(layout), key)
        back = dict(zip(order, decoded.split([cuts[i] for i in order]), strict=True))
        return torch.cat([back[i] for i in range(len(SHAPES))]).to(x)

    return q


OPTIONS: list[dict[str, Any]] = [
    {"order": "paper"},
    {"order": "fresh"},
    {"order": "paper", "outer_momentum": 0.4, "warmup_steps": 5},
    {"order": "fresh", "outer_momentum": 0.4, "global_every": 3},
    {"order": "paper", "global_every": 4, "period": [(0, 2), (8, 3)]},
]


def twin_rows(n: int, steps: int, spec: str, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    twin = CompressedTwin(
        start().to(dtype).double(),
        problem(n).gradient,
        SGDM(0.05, 0.9, weight_decay=1e-3),
        make_topology("ring", n),
        operator(spec, dtype),
        **{"period": 3, **options},
    )
    rows = []
    for _ in range(steps):
        twin.step()
        rows.append(twin.X)
    return torch.stack(rows, 1)


def worst(found: list[Tensor], expected: Tensor) -> float:
    return float((torch.stack(found).double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loopback_equals_the_twin(spec: str, options: dict[str, Any]) -> None:
    options = {"period": 3, "gamma": 0.4, **options}
    found = run_ranks(train, 4, "loopback", (4, 40, torch.float64, {"compressor": spec, **options}), timeout=60)
    # Rounding in another order; a sign of a difference that is rounding alone could flip, but none is here.
    assert worst(found, twin_rows(4, 40, spec, torch.float64, options)) < 1e-10


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_processes_equal_threads(ranks: RankPool, n: int, spec: str) -> None:
    options = {"compressor": spec, "period": 3, "order": "paper" if n % 2 else "fresh", "gamma": 0.4}
    arguments = (n, 15, torch.float32, options)
    virtual = run_ranks(train, n, "loopback", arguments, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(ranks.run(train, n, arguments), virtual, strict=True))


def dense(rank: int, n: int) -> Tensor:
    """The last parameters of PD-SGDM and of CPD-SGDM without compression, side by side."""
    results = []
    for kind, options in ((PDSGDM, {}), (CPDSGDM, {"compressor": "identity", "gamma": 1.0, "order": "fresh"})):
        task = noisy_quadratics(n, 30, sigma=0.3)
        x = torch.nn.Parameter(torch.ones(30, dtype=torch.float64))
        optimizer = kind([x], lr=0.1, momentum=0.9, period=4, **options)  # type: ignore[operator]
        for step in range(1, 41):
            x.grad = task.gradient(rank, x.detach(), step)
            optimizer.step()
        results.append(x.detach())
    return torch.stack(results)


def test_identity_with_gamma_1_in_fresh_order_is_pd_sgdm() -> None:
    for pair in run_ranks(dense, 5, "loopback", (5,), timeout=60):
        assert torch.allclose(pair[0], pair[1], rtol=0, atol=1e-12)
