"""Linear speed-up on virtual ranks: the stationary error of n workers, who average n noises, is n times smaller."""

from __future__ import annotations

import pytest
import torch

from decent_opt import PDSGDM
from decent_opt.simulation import noisy_quadratics
from decent_opt.testing import run_ranks

DIMENSION, LR, MOMENTUM, SIGMA, BURN_IN, STEPS = 150, 0.02, 0.9, 1.0, 100, 500


def visit(rank: int, size: int) -> torch.Tensor:
    """This worker's parameters after each step, (steps, d), from the optimum on."""
    problem = noisy_quadratics(size, DIMENSION, mu=0.3, common_curvature=True, sigma=SIGMA, seed=11)
    x = torch.nn.Parameter(problem.optimum.clone())
    optimizer = PDSGDM([x], lr=LR, momentum=MOMENTUM, period=4)
    path = torch.empty(STEPS, DIMENSION, dtype=torch.float64)
    for step in range(BURN_IN + STEPS):
        x.grad = problem.gradient(rank, x.detach(), step + 1)
        optimizer.step()
        if step >= BURN_IN:
            path[step - BURN_IN] = x.detach()
    return path


def test_stationary_error_times_workers_is_constant() -> None:
    """Per eigenvalue a: a^2 Var = a lr s^2 (1 + mu) / ((1 - mu) (2 (1 + mu) - lr a)) with s^2 = sigma^2 / (d n)."""
    a = torch.linspace(0.3, 1.0, DIMENSION, dtype=torch.float64)
    plus, minus = 1 + MOMENTUM, 1 - MOMENTUM
    expected = float((a * LR * SIGMA**2 / DIMENSION * plus / (minus * (2 * plus - LR * a))).sum())
    products = []
    for size in (1, 2, 4, 8, 16):
        problem = noisy_quadratics(size, DIMENSION, mu=0.3, common_curvature=True, sigma=SIGMA, seed=11)
        mean = torch.stack(run_ranks(visit, size, "loopback", (size,))).mean(dim=0)
        errors = torch.stack([problem.mean_gradient(x).square().sum() for x in mean])
        products.append(float(errors.mean()) * size)
    # 10 %: four times the sampling error of 500 steps (150 coordinates, some 30 independent times).
    assert products == pytest.approx([expected] * 5, rel=0.1), products
    assert max(products) / min(products) <= 1.1
