"""The twin of CPD-SGDM: what it must equal, what it must keep, and where its copies restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_opt.simulation import SGDM, CompressedTwin, ExplicitCopiesTwin, PeriodicTwin, noisy_quadratics
from decent_opt.topology import make_topology

# Identities hold up to the rounding of float64: 1e-12 after a hundred steps on numbers of size 1.
CLOSE = {"rtol": 0.0, "atol": 1e-12}
ORDERS = ("paper", "fresh")
PROBLEM = noisy_quadratics(6, 12, sigma=0.5, seed=4)
START = torch.linspace(-1, 1, 12, dtype=torch.float64)


def identity(worker: int, x: Tensor, round: int) -> Tensor:
    return x


def sign(worker: int, x: Tensor, round: int) -> Tensor:
    return x.abs().mean() * x.sign()


def random_quarter(worker: int, x: Tensor, round: int) -> Tensor:
    """A quarter of the coordinates; which, depends on worker and round."""
    chosen = np.random.default_rng((worker, round)).permutation(len(x))[: len(x) // 4]
    kept = torch.zeros_like(x)
    kept[chosen] = x[chosen]
    return kept


def zero_gradient(worker: int, x: Tensor, step: int) -> Tensor:
    return torch.zeros_like(x)


def twin_of(kind=CompressedTwin, operator=sign, *, topology="ring", size=6, lr=0.02, **options) -> CompressedTwin:
    return kind(
        START,
        PROBLEM.gradient,
        SGDM(lr, momentum=0.9),
        make_topology(topology, size),
        operator,
        **{"gamma": 0.3, "period": 2} | options,
    )


OPTIONS = [
    {},
    {"warmup_steps": 5},
    {"global_every": 3, "outer_momentum": 0.5},
    {"period": [(0, 1), (7, 3)], "outer_momentum": 0.3, "warmup_steps": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_identity_with_gamma_one_in_fresh_order_is_pd_sgdm(options):
    options = {"period": 2} | options
    dense = PeriodicTwin(START, PROBLEM.gradient, SGDM(0.02, momentum=0.9), make_topology("ring", 6), **options)
    twin = twin_of(operator=identity, gamma=1.0, order="fresh", **options)
    for _ in range(40):
        dense.step()
        twin.step()
        torch.testing.assert_close(twin.X, dense.X, **CLOSE)
    assert twin.consensus_error > 1e-3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("operator", [identity, sign, random_quarter])
@pytest.mark.parametrize("topology", ["ring", "star"])
@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_ones_own_are_the_copies_that_all_agree_on(order, topology, operator, options):
    options = options | {"order": order, "topology": topology}
    agreed, own = twin_of(CompressedTwin, operator, **options), twin_of(ExplicitCopiesTwin, operator, **options)
    for _ in range(40):
        agreed.step()
        own.step()
        torch.testing.assert_close(own.X, agreed.X, **CLOSE)
        torch.testing.assert_close(own.copies, agreed.copies, **CLOSE)
    assert agreed.consensus_error > 1e-3


@pytest.mark.parametrize("operator", [sign, random_quarter])
@pytest.mark.parametrize("order", ORDERS)
def test_no_round_moves_the_average(order, operator):
    twin = twin_of(operator=operator, order=order, period=1)
    twin.gradient = zero_gradient
    twin.X = twin.X_prev = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 12)))
    mean, distance = twin.mean, twin.consensus_error
    for _ in range(100):
        twin.step()
        torch.testing.assert_close(twin.mean, mean, **CLOSE)
    assert twin.consensus_error < distance / 100  # and yet they mix


def test_by_hand():
    """Two workers, W = all 1/2, gamma 1/2; Q(x) = x, later half of x."""
    half = {0: 1.0, 1: 0.5}
    rows = {"paper": [], "fresh": []}
    for order, seen in rows.items():
        twin = CompressedTwin(
            torch.zeros(1, dtype=torch.float64),
            lambda k, x, t: torch.full_like(x, -4.0 * k * (t == 1)),
            SGDM(1.0),
            make_topology("complete", 2),
            lambda k, x, r: half[r] * x,
            gamma=0.5,
            order=order,
            period=1,
        )
        for _ in range(2):
            twin.step()
            seen.append((twin.X.flatten().tolist(), twin.copies.flatten().tolist(), twin.error))
    # X = (0, 4). Paper: the copies are still x_0, so nothing moves and then all is sent. Fresh: sent, then mixed.
    assert rows["paper"][0] == ([0, 4], [0, 4], 8)
    assert rows["fresh"][0] == ([1, 3], [0, 4], 8)
    assert rows["paper"][1] == ([1, 3], [0.5, 3.5], 1)
    assert rows["fresh"][1] == ([1.75, 2.25], [0.5, 3.5], 1)


@pytest.mark.parametrize("order", ORDERS)
def test_copies_restart_where_all_are_equal(order):
    twin = twin_of(order=order, warmup_steps=4, global_every=3)
    for t in range(1, 41):
        twin.step()
        # Steps 2 and 4 belong to the warm-up; rounds are at 6, 8, 10, ... and every third is exact.
        if t == 4 or (t > 4 and t % 2 == 0 and (t - 4) // 2 % 3 == 0):
            torch.testing.assert_close(twin.copies, twin.X, rtol=0, atol=0)
            assert twin.consensus_error < 1e-28
        elif t > 4:
            assert twin.consensus_error > 1e-8


def test_after_an_exact_average_the_copies_are_what_all_know_whatever_outer_momentum_does():
    twin = twin_of(global_every=2, outer_momentum=0.5)
    for _ in range(4):
        twin.step()
    assert twin.copies.std(dim=0).max() < 1e-15
    assert twin.X.std(dim=0).max() > 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_the_operator_sees_worker_and_round(order):
    seen = []

    def watched(worker: int, x: Tensor, round: int) -> Tensor:
        seen.append((worker, round))
        return x

    twin = twin_of(operator=watched, order=order, size=3, global_every=3)
    for _ in range(8):
        twin.step()
    assert seen == [(k, r) for r in (0, 1, 3) for k in range(3)]  # the third round is exact and sends no difference


def test_a_single_worker_has_no_rounds():
    twin = twin_of(size=1, operator=lambda k, x, r: pytest.fail("a message to nobody"), outer_momentum=0.5)
    alone = PeriodicTwin(START, PROBLEM.gradient, SGDM(0.02, momentum=0.9), make_topology("ring", 1))
    for _ in range(20):
        twin.step()
        alone.step()
    assert torch.equal(twin.X, alone.X)
    assert twin.rounds == 0


@pytest.mark.parametrize(("gamma", "beta", "stable"), [(1.0, 0.0, True), (1.0, 0.5, False), (0.4, 0.5, True)])
def test_outer_momentum_multiplies_gamma_too(gamma, beta, stable) -> None:
    """What it adds up is the movement of a round, mixing included: gamma / (1 - beta) has to be below the edge."""
    twin = twin_of(gamma=gamma, outer_momentum=beta, order="fresh", period=1)
    for _ in range(300):
        twin.step()
    assert (twin.consensus_error < 1.0) == stable
