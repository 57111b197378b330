"""The local rules of the twin against torch's own optimizers, in float64, with one worker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decent_opt.simulation import SGDM, AdamW, PeriodicTwin, SharedMomentAdamW, noisy_quadratics
from decent_opt.topology import make_topology

PROBLEM = noisy_quadratics(1, 7, sigma=0.5, seed=3)
START = torch.linspace(-1, 1, 7, dtype=torch.float64)
ALONE = make_topology("ring", 1)
# Two parameter groups: the first three coordinates, and the other four.
LR, DECAY = (0.05, 0.02), (0.1, 0.0)


def per_coordinate(values: tuple[float, float]) -> Tensor:
    return torch.tensor([values[0]] * 3 + [values[1]] * 4, dtype=torch.float64)


def torch_after(steps: int, make) -> Tensor:
    """Where torch's optimizer of the two groups stands after these steps."""
    params = [START[:3].clone(), START[3:].clone()]
    groups = [{"params": [p], "lr": lr, "weight_decay": decay} for p, lr, decay in zip(params, LR, DECAY, strict=True)]
    optimizer = make(groups)
    for t in range(1, steps + 1):
        g = PROBLEM.gradient(0, torch.cat(params), t)
        params[0].grad, params[1].grad = g[:3], g[3:]
        optimizer.step()
    return torch.cat(params)


def twin_after(steps: int, rule) -> Tensor:
    # One worker has no rounds: whatever concerns them must change nothing.
    twin = PeriodicTwin(START, PROBLEM.gradient, rule, ALONE, period=1, global_every=2, outer_momentum=0.5)
    for _ in range(steps):
        twin.step()
    assert twin.rounds == 0
    return twin.X[0]


SGD_OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]


# 1e-13: rounding of a hundred steps on numbers of size 1, taken in another order.
@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgdm_is_torchs(options):
    rule = SGDM(per_coordinate(LR), weight_decay=per_coordinate(DECAY), **options)
    expected = torch_after(100, lambda groups: torch.optim.SGD(groups, **options))
    torch.testing.assert_close(twin_after(100, rule), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.8), "eps": 1e-3}], ids=str)
def test_adamw_is_torchs(options):
    rule = AdamW(per_coordinate(LR), weight_decay=per_coordinate(DECAY), **options)
    expected = torch_after(100, lambda groups: torch.optim.AdamW(groups, **options))
    torch.testing.assert_close(twin_after(100, rule), expected, rtol=0, atol=1e-13)


def test_a_learning_rate_may_change_between_steps():
    rule = SGDM(0.1)
    twin = PeriodicTwin(START, lambda k, x, t: torch.ones_like(x), rule, ALONE)
    twin.step()
    rule.lr = 0.01
    twin.step()
    torch.testing.assert_close(twin.X[0], START - 0.11)


def test_frozen_adamw_keeps_the_corrected_second_moment_of_the_warmup():
    lr, b1, b2, eps = 0.1, 0.9, 0.99, 1e-8
    rule = SharedMomentAdamW(lr, (b1, b2), eps, weight_decay=0.0, sizes=[1], second_moment="frozen", floor=0.0)
    gradients = [3.0, -1.0, 2.0, 50.0, 0.5]  # three of the warm-up, two afterwards
    x0 = torch.zeros(1, dtype=torch.float64)
    twin = PeriodicTwin(x0, lambda k, x, t: torch.full_like(x, gradients[t - 1]), rule, ALONE, warmup_steps=3)

    x, m, v = 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        twin.step()
        m = b1 * m + (1 - b1) * g
        if t <= 3:
            v = b2 * v + (1 - b2) * g**2
        x -= lr * m / (1 - b1**t) / ((v / (1 - b2 ** min(t, 3))) ** 0.5 + eps)
        assert twin.X.item() == pytest.approx(x, rel=1e-13)


@pytest.mark.parametrize("rule", [SGDM(0.1, momentum=0.9), AdamW(0.1)], ids=lambda rule: type(rule).__name__)
def test_the_twin_computes_in_the_type_of_its_start(rule):
    twin = PeriodicTwin(START.float(), PROBLEM.gradient, rule, ALONE)
    twin.step()
    assert twin.X.dtype == torch.float32
    assert {moment.dtype for moment in rule.state.values()} == {torch.float32}
