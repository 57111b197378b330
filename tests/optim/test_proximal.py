"""Proximal steps: exact against their definition, after plain SGD, and what they weigh after others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import PDSGDM, ConfigError
from decent_opt.optim import L1, L2, Box, proximal
from decent_opt.simulation import ISEGA, l1_prox, least_squares, mask_of
from decent_opt.sparsification import BlockMean, BlockSampler
from decent_opt.testing import RankPool, run_ranks

D, STEPS, WEIGHT, LR = 20, 30, 0.3, 0.02


@pytest.mark.parametrize(
    ("regularizer", "value"),
    [
        (L1(0.7), lambda x: 0.7 * x.abs()),
        (L2(0.7), lambda x: 0.35 * x.square()),
        (Box(-0.5, 0.25), lambda x: torch.where((x < -0.5) | (x > 0.25), float("inf"), 0.0)),
    ],
)
def test_a_prox_is_the_minimum_that_defines_it(regularizer: Any, value: Any) -> None:
    lr, grid = 0.3, torch.linspace(-2, 2, 40001, dtype=torch.float64)  # with steps of 1e-4, and 0 on it
    for y in (-1.7, -0.51, -0.21, -0.1, 0.0, 0.2, 0.26, 1.3):
        best = grid[(value(grid) + (grid - y).square() / (2 * lr)).argmin()]
        x = [torch.tensor([y], dtype=torch.float64)]
        regularizer.prox_(x, lr)
        assert abs(float(x[0]) - float(best)) <= 1.01e-4


def test_l1_makes_exact_zeros_and_keeps_nan() -> None:
    x = [torch.tensor([0.1, -0.1, 0.1000001, float("nan")])]
    L1(1.0).prox_(x, 0.1)
    assert x[0][:2].tolist() == [0.0, 0.0] and float(x[0][2]) > 0 and bool(x[0][3].isnan())


def _isega(rank: int, n: int) -> Tensor:
    problem = least_squares(n, 8, D, noise=1.0, heterogeneity=1.0, seed=1)
    x = nn.Parameter(torch.zeros(D, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=LR)
    proximal(optimizer, L1(WEIGHT))
    mean, path = BlockMean(D, 0.3, "control_variate", block=2), []
    for _ in range(STEPS):
        x.grad = mean.mean_(problem.gradient(rank, x.detach()))
        optimizer.step()
        path.append(x.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_after_sgd_it_is_isega_with_a_prox(ranks: RankPool, n: int) -> None:
    problem = least_squares(n, 8, D, noise=1.0, heterogeneity=1.0, seed=1)
    sampler = BlockSampler.over(D, 0.3, block=2)
    tau, x0 = sampler.kept / sampler.blocks.count, torch.zeros(D, dtype=torch.float64)
    twin = ISEGA(x0, problem.gradients, n, mask_of(sampler, D), tau=tau, lr=LR, prox=l1_prox(WEIGHT))
    expected = []
    for _ in range(STEPS):
        twin.step()
        expected.append(twin.x)
    assert bool((expected[-1] == 0).any()) and bool((expected[-1] != 0).any())
    virtual = run_ranks(_isega, n, "loopback", (n,))
    for path in virtual:
        # Float64 sums in another order.
        assert float((path - torch.stack(expected)).abs().max()) <= 1e-10
        assert torch.equal(path[-1] == 0, expected[-1] == 0)
    assert all(torch.equal(path, virtual[0]) for path in virtual + ranks.run(_isega, n, (n,)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_divides_the_weight(momentum: float) -> None:
    """Documented: after SGD with momentum R counts 1 - mu times. min (x - b)^2/2 + w |x| is soft thresholding of b."""
    b = torch.tensor([2.0, -0.5, 0.2, -3.0], dtype=torch.float64)
    x = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.02, momentum=momentum)
    proximal(optimizer, L1(WEIGHT / (1 - momentum)))
    for _ in range(3000):
        x.grad = x.detach() - b
        optimizer.step()
    expected = b.sign() * (b.abs() - WEIGHT).clamp(min=0)
    assert torch.allclose(x.detach(), expected, atol=1e-9)


def test_every_group_with_its_own_lr_and_only_what_was_stepped() -> None:
    a, b, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a, frozen]}, {"params": [b], "lr": 0.5}], lr=0.1)
    proximal(optimizer, L1(1.0))
    a.grad, b.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert a.tolist() == pytest.approx([0.9] * 3) and b.tolist() == pytest.approx([0.5] * 3)
    assert frozen.tolist() == [1.0] * 3


def test_some_parameters_only_and_removal() -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    handle = proximal(optimizer, Box(0.0, 0.5), [a])
    a.grad, b.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert a.tolist() == [0.5] * 3 and b.tolist() == [1.0] * 3
    with torch.no_grad():
        a.fill_(1.0)
    other, (twin, _) = copy.deepcopy((optimizer, [a, b]))
    del twin
    other.step()  # a copy comes without
    assert other.param_groups[0]["params"][0].tolist() == [1.0] * 3
    handle.remove()
    optimizer.step()
    assert a.tolist() == [1.0] * 3


def test_l2_after_adam_is_decoupled_decay() -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    adam, adamw = torch.optim.Adam([ours], lr=1e-3), torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1)
    proximal(adam, L2(0.1))
    for step in range(20):
        ours.grad = torch.randn(3, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        adam.step()
        adamw.step()
    # They differ in second order of lr weight = 1e-4, and in which of the two comes first.
    assert torch.allclose(ours, theirs, atol=1e-5) and float((1 - ours.detach()).abs().max()) > 1e-3


def _after_rounds(rank: int) -> bool:
    x = nn.Parameter(torch.full((4,), 1.0 + rank))
    optimizer = PDSGDM([x], lr=0.1, period=2, topology="complete")
    proximal(optimizer, Box(0.0, 1.2))
    for _ in range(4):
        x.grad = torch.full((4,), -3.0 if rank else 3.0)
        optimizer.step()
        if not bool(((x >= 0) & (x <= 1.2)).all()):
            return False
    return True


def test_a_box_holds_after_rounds_too() -> None:
    assert all(run_ranks(_after_rounds, 3, "loopback"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: L1(-1), "L1: the weight must be a finite number from 0 on, got -1"),
        (lambda: L2(float("nan")), "L2: the weight must be a finite number from 0 on, got nan"),
        (lambda: Box(1, 0), "Box: low has to be at most high, got 1 and 0"),
        (
            lambda: proximal(torch.optim.SGD([nn.Parameter(torch.ones(1))]), L1(1), [torch.ones(1)]),
            "params: a tensor among them is no parameter of the optimizer",
        ),
    ],
)
def test_refusals(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == sentence
