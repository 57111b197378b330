"""The right-hand sides of the theorems: published numbers, and that nothing measured is above them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from decent_opt.simulation import SGDM, CompressedTwin, PeriodicTwin, noisy_quadratics
from decent_opt.theory import (
    Constants,
    choco_gamma,
    choco_rate,
    compressed_consensus_bound,
    consensus_bound,
    gradient_bound,
    largest_lr,
)
from decent_opt.topology import make_topology, spectral_gap

RING = make_topology("ring", 8)


@pytest.mark.parametrize(
    ("momentum", "square", "bounds"),
    [(0.0, 14.95, (7.9, 127, 507, 2026)), (0.9, 15.5, (8.2, 131, 525, 2101))],
)
def test_consensus_bounds_of_a_ring_of_8(momentum, square, bounds) -> None:
    """A table made with lr / (1 - mu) = 0.05 on a problem whose G^2 was 14.95, and 15.5 with momentum."""
    for period, bound in zip((1, 4, 8, 16), bounds, strict=True):
        found = consensus_bound(square**0.5, 0.05 * (1 - momentum), period, spectral_gap(RING), momentum)
        assert found == pytest.approx(bound, rel=6e-3)


def test_by_hand() -> None:
    assert largest_lr(L=4.0, momentum=0.5) == 1 / 32
    assert consensus_bound(G=2.0, lr=0.25, period=3, rho=1.0, momentum=0.5) == 90
    assert compressed_consensus_bound(G=2.0, lr=0.25, period=3, alpha=0.5, momentum=0.5) == 594
    problem = Constants(workers=4, L=2.0, sigma=3.0, G=1.0, gap=6.0)
    assert gradient_bound(problem, lr=0.0625, steps=8, consensus=0.5, momentum=0.5) == 12 + 1.125 + 2
    assert gradient_bound(problem, lr=0.07, steps=8, consensus=0.5, momentum=0.5) == math.inf


def sign(worker: int, x: Tensor, round: int) -> Tensor:
    return x.abs().mean() * x.sign()


@pytest.mark.parametrize("compressed", [False, True], ids=["pd", "cpd"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("period", [1, 6])
def test_what_is_measured_is_below(period, momentum, compressed) -> None:
    problem = noisy_quadratics(8, 30, sigma=0.5, seed=3)
    largest = 0.0

    def watched(worker: int, x: Tensor, step: int) -> Tensor:
        nonlocal largest
        g = problem.gradient(worker, x, step)
        largest = max(largest, float(g.square().sum()))
        return g

    lr, steps = largest_lr(problem.L, momentum), 200
    start, rule = torch.full((30,), 0.5, dtype=torch.float64), SGDM(lr, momentum)
    alpha = choco_rate(RING, 2 / math.pi)
    if compressed:
        gamma = choco_gamma(RING, 2 / math.pi)
        twin = CompressedTwin(start, watched, rule, RING, sign, gamma=gamma, period=period)
    else:
        twin = PeriodicTwin(start, watched, rule, RING, period=period)
    gap = 0.5 * float((start - problem.optimum) @ problem.curvature.mean(dim=0) @ (start - problem.optimum))
    squares, errors = [], []
    for _ in range(steps):
        squares.append(float(problem.mean_gradient(twin.mean).square().sum()))
        twin.step()
        errors.append(twin.consensus_error)
    G = largest**0.5
    bound = (
        compressed_consensus_bound(G, lr, period, alpha, momentum)
        if compressed
        else consensus_bound(G, lr, period, spectral_gap(RING), momentum)
    )
    assert 0 < max(errors) <= bound
    assert sum(squares) / steps <= gradient_bound(Constants(8, problem.L, 0.5, G, gap), lr, steps, bound, momentum)
