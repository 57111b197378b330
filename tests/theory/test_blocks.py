"""The step sizes of the block methods: by hand, against each other, and against the inequalities they rest on."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from decent_opt.simulation import (
    IASGD,
    IBCD,
    ISGD,
    SharedISAGA,
    coordinate_mask,
    everything,
    least_squares,
    one_sample,
    steps_until,
)
from decent_opt.theory import (
    ibcd_rate,
    ibcd_slowdown,
    ibcd_step,
    isaga_rate,
    isaga_safe_step,
    isaga_step,
    isega_practical_step,
    isega_rate,
    isega_step,
    isgd_decreasing_steps,
    isgd_noise_floor,
    isgd_step,
    nesterov_constants,
    sparsified_dissimilarity,
    sparsified_growth,
)


def test_by_hand() -> None:
    assert ibcd_step(L=4.0, workers=4, tau=0.25) == 4 / (4 * 1.75)
    assert ibcd_step(L=4.0, workers=4, tau=0.25, mean_L=2.0) == 4 / (2 + 3)
    assert ibcd_rate(L=4.0, mu=0.7, workers=4, tau=0.25) == pytest.approx(0.9)
    assert isgd_step(L=2.0, workers=4, tau=0.5) == 0.5
    assert isgd_noise_floor(lr=0.1, mu=0.5, variance=3.0, workers=4) == pytest.approx(0.3)
    decreasing = isgd_decreasing_steps(L=2.0, mu=0.8, workers=4, tau=0.5)
    assert [decreasing(0), decreasing(10)] == [0.25, 0.2]
    assert isaga_step(L=2.0, workers=6, tau=0.5) == 0.5
    assert isaga_safe_step(L=2.0, workers=6, tau=0.5) == 1 / 3
    assert isaga_rate(mu=0.4, tau=0.5, lr=0.5, refresh=0.1) == 0.95
    assert isaga_rate(mu=0.4, tau=0.5, lr=0.25, refresh=0.4) == 0.95
    assert isega_step(L=2.0, workers=6, tau=0.25) == 1 / 8
    assert isega_practical_step(L=2.0, workers=6, tau=0.25) == 1 / 3
    assert isega_rate(mu=0.1, tau=0.25, lr=2.0) == 0.875
    assert isega_rate(mu=0.1, tau=0.25, lr=1.0) == 0.9
    assert sparsified_growth(growth=3.0, workers=4, tau=0.25) == 3.75
    assert sparsified_dissimilarity(dissimilarity=2.0, workers=4, tau=0.25) == 2.5


@pytest.mark.parametrize("workers", [1, 2, 10, 100])
def test_at_one_nth_of_the_blocks_the_price_is_below_two(workers) -> None:
    tau = 1 / workers
    assert ibcd_slowdown(workers, tau) == pytest.approx(2 - 1 / workers)
    assert ibcd_slowdown(workers, tau) == pytest.approx(1 / (tau * ibcd_step(1.0, workers, tau)))
    assert isega_practical_step(1.0, workers, tau) >= 0.5
    assert sparsified_dissimilarity(1.0, workers, tau) == pytest.approx(2 - 1 / workers)


def test_with_everything_sent_they_are_those_of_the_dense_methods() -> None:
    assert ibcd_step(2.0, 7, 1.0) == isega_step(2.0, 7, 1.0) == isega_practical_step(2.0, 7, 1.0) == 0.5
    assert ibcd_step(2.0, 7, 1.0, mean_L=0.5) == 2.0
    assert ibcd_slowdown(7, 1.0, spread=5.0) == sparsified_dissimilarity(9.0, 7, 1.0) == 1


def test_without_growth_the_constants_are_nesterovs() -> None:
    c = nesterov_constants(L=4.0, mu=0.04, growth=1.0)
    assert (c.eta, c.beta, c.gamma) == pytest.approx((0.25, 0.9, 10.0))
    assert c.alpha == pytest.approx(0.1 / 1.1)
    rescaled = nesterov_constants(L=400.0, mu=4.0, growth=1.0)  # units: only eta has any
    assert (rescaled.eta, rescaled.alpha, rescaled.beta, rescaled.gamma) == pytest.approx(
        (0.0025, c.alpha, c.beta, c.gamma)
    )


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.1])
def test_the_second_moment_that_all_rests_on(tau) -> None:
    """E||(1/n) sum (g_i)_{U_i}||^2 = tau^2 ||mean g||^2 + tau (1 - tau) / n * mean ||g_i||^2."""
    n, d = 5, 20
    g = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    mask = coordinate_mask(n, d, round(tau * d))
    found = [(torch.stack([mask(i, t) for i in range(n)]) * g).mean(dim=0).square().sum().item() for t in range(3000)]
    expected = tau**2 * g.mean(dim=0).square().sum() + tau * (1 - tau) / n * g.square().sum(dim=1).mean()
    # the standard error of 3000 draws is below 1.2 %
    assert sum(found) / len(found) == pytest.approx(float(expected), rel=0.04)


ZERO = torch.zeros(10, dtype=torch.float64)


def test_ibcd_is_as_fast_as_proved() -> None:
    problem, tau = least_squares(10, 3, 10, seed=1), 0.1
    rate, steps = ibcd_rate(problem.L, problem.mu, 10, tau), 200
    left = []
    for seed in range(20):
        twin = IBCD(
            ZERO, problem.gradients, 10, coordinate_mask(10, 10, 1, seed=seed), lr=ibcd_step(problem.L, 10, tau)
        )
        for _ in range(steps):
            twin.step()
        left.append((twin.x - problem.optimum).square().sum() / problem.optimum.square().sum())
    assert 0 < sum(left) / len(left) <= rate**steps


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_isgd_stays_below_its_noise_floor_and_not_far_below(tau) -> None:
    problem = least_squares(10, 20, 10, noise=1.0, heterogeneity=0.3, seed=2)
    variance = float(problem.sample_gradients(problem.optimum, torch.arange(200)).square().sum(dim=1).mean())
    lr = isgd_step(problem.sample_L, 10, tau)
    twin = ISGD(problem.optimum, one_sample(problem), 10, coordinate_mask(10, 10, round(10 * tau)), lr=lr)
    errors = []
    for _ in range(4000):
        twin.step()
        errors.append((twin.x - problem.optimum).square().sum())
    floor = isgd_noise_floor(lr, problem.mu, variance, 10)
    # The bound takes mu for every direction and every sample for the worst; it is an upper bound within a factor of 20.
    assert floor / 20 < float(sum(errors[1000:])) / 3000 <= floor


def test_with_one_nth_of_the_blocks_the_noise_is_that_of_one_worker() -> None:
    """At equal speed lr tau, tau = 1/n leaves 1/tau times the noise: the gain of averaging is gone."""
    problem = least_squares(10, 200, 10, noise=1.0, seed=3)
    speed, floors = 0.01, []
    for tau in (1.0, 0.1):
        mask = coordinate_mask(10, 10, round(10 * tau))
        twin = ISGD(problem.optimum, one_sample(problem, shared=True), 10, mask, lr=speed / tau)
        errors = []
        for _ in range(6000):
            twin.step()
            errors.append((twin.x - problem.optimum).square().sum())
        floors.append(float(sum(errors[1000:])))
    assert 8 < floors[1] / floors[0] < 13  # and a little more than 10: the noise itself is fed by the distance


def test_decreasing_steps_bring_the_noise_down() -> None:
    problem = least_squares(10, 20, 10, noise=1.0, seed=4)
    steps = isgd_decreasing_steps(problem.sample_L, problem.mu, 10, 0.1)
    twin = ISGD(ZERO, one_sample(problem, shared=True), 10, coordinate_mask(10, 10, 1), lr=steps)
    errors = []
    for _ in range(16000):
        twin.step()
        errors.append(float((twin.x - problem.optimum).square().sum()))
    early, late = sum(errors[3000:5000]) / 2000, sum(errors[14000:]) / 2000
    assert late < early / 2  # 1/t: 3.75; correlated over thousands of steps, hence the room


def test_isaga_is_as_fast_as_proved() -> None:
    problem, tau = least_squares(10, 6, 10, noise=1.0, heterogeneity=0.5, seed=5), 0.2
    lr = isaga_safe_step(problem.sample_L, 10, tau)
    rate = isaga_rate(problem.mu, tau, lr, refresh=1 - (1 - tau / 60) ** 10)
    twin = SharedISAGA(ZERO, problem, coordinate_mask(10, 10, 2), lr=lr)
    steps = steps_until(twin, problem.optimum, below=1e-10, limit=20000)
    assert steps is not None
    assert rate**steps > 1e-10  # as fast, or faster


def test_acceleration_is_as_fast_as_proved_and_needs_its_alpha() -> None:
    problem, n, d = least_squares(10, 100, 10, kappa=100, seed=6), 10, 10
    growth = sparsified_dissimilarity(problem.dissimilarity, n, 1 / d)
    constants = nesterov_constants(problem.mean_L, problem.mu, growth)
    twin = IASGD(ZERO, problem.gradients, n, coordinate_mask(n, d, 1), tau=1 / d, constants=constants)
    steps = steps_until(twin, problem.optimum, below=1e-10, limit=5000)
    assert steps is not None
    assert steps <= 1.2 * -torch.tensor(1e-10).log() * growth * sqrt(problem.mean_L / problem.mu)
    plain = IBCD(ZERO, problem.gradients, n, everything(d), lr=1 / problem.mean_L)
    assert steps < steps_until(plain, problem.optimum, below=1e-10, limit=5000)
