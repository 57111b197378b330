"""The quadratics: their gradients, noise and constants are what they say."""

from __future__ import annotations

import pytest
import torch

from decent_opt.simulation import noisy_quadratics

PROBLEM = noisy_quadratics(4, 10, L=3.0, mu=0.2, sigma=0.7, seed=5)
X = torch.linspace(-1, 2, 10, dtype=torch.float64)


def test_gradient_is_that_of_the_quadratic():
    x = X.clone().requires_grad_()
    difference = x - PROBLEM.centre[2]
    (difference @ PROBLEM.curvature[2] @ difference / 2).backward()
    torch.testing.assert_close(PROBLEM.gradient(2, X, 9) - PROBLEM.noise(2, 9), x.grad)


def test_mean_gradient_is_the_mean_and_vanishes_at_the_optimum():
    exact = [PROBLEM.gradient(k, X, 1) - PROBLEM.noise(k, 1) for k in range(4)]
    torch.testing.assert_close(PROBLEM.mean_gradient(X), torch.stack(exact).mean(dim=0))
    assert PROBLEM.mean_gradient(PROBLEM.optimum).abs().max() < 1e-14


def test_constants():
    assert pytest.approx(3.0) == PROBLEM.L
    assert PROBLEM.mu == pytest.approx(0.2)
    noise = torch.stack([PROBLEM.noise(k, t) for k in range(4) for t in range(500)])
    # 2000 draws of ten coordinates: 1 % is the sampling error
    assert noise.square().sum(dim=1).mean().sqrt().item() == pytest.approx(0.7, rel=0.02)
    assert noise.mean(dim=0).abs().max() < 0.02


def test_noise_is_a_function_of_seed_worker_and_step_alone():
    before = torch.get_rng_state()
    again = noisy_quadratics(4, 10, L=3.0, mu=0.2, sigma=0.7, seed=5)
    assert torch.equal(again.gradient(1, X, 3), PROBLEM.gradient(1, X, 3))
    other_seed = noisy_quadratics(4, 10, sigma=0.7, seed=6)
    noises = [PROBLEM.noise(1, 3), PROBLEM.noise(3, 1), PROBLEM.noise(1, 4), other_seed.noise(1, 3)]
    assert len({tuple(noise.tolist()) for noise in noises}) == 4
    after = torch.get_rng_state()
    assert torch.equal(before, after)


def test_gradient_keeps_the_type_of_x():
    g = PROBLEM.gradient(0, X.float(), 1)
    assert g.dtype == torch.float32
    torch.testing.assert_close(g, PROBLEM.gradient(0, X.float().double(), 1).float(), rtol=0, atol=0)


def test_common_curvature_shares_the_axes_and_heterogeneity_is_the_distance_of_the_centres():
    problem = noisy_quadratics(200, 8, heterogeneity=3.0, common_curvature=True)
    assert torch.equal(problem.curvature[0], problem.curvature[7])
    distance = problem.centre.square().sum(dim=1).mean().sqrt().item()
    assert distance == pytest.approx(3.0, rel=0.05)  # 1600 normal numbers: 2 % is the sampling error
