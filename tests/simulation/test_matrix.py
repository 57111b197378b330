"""The matrix twin against what is known of the algorithm: identities, schedules, and rates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_opt.simulation import SGDM, AdamW, PeriodicTwin, noisy_quadratics
from decent_opt.topology import CyclicTopology, make_topology, spectral_gap

# Identities hold up to the rounding of float64: 1e-12 after a hundred steps on numbers of size 1.
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def zero_gradient(worker: int, x: Tensor, step: int) -> Tensor:
    return torch.zeros_like(x)


def random_topology(size: int, rounds: int, seed: int) -> CyclicTopology:
    """Means of random permutations: doubly stochastic, far from symmetric, another W each round."""
    rng = np.random.default_rng(seed)

    def random_matrix() -> np.ndarray:
        orders = [np.arange(size), *(rng.permutation(size) for _ in range(3))]
        return np.tensordot(rng.dirichlet(np.ones(4)), [np.eye(size)[order] for order in orders], axes=1)

    return CyclicTopology([random_matrix() for _ in range(rounds)], "random")


class TestIdentities:
    def test_complete_graph_every_step_is_sgd_on_the_mean_gradient(self):
        problem = noisy_quadratics(5, 6, sigma=1.0, seed=1)
        x = torch.ones(6, dtype=torch.float64)
        twin = PeriodicTwin(x, problem.gradient, SGDM(0.1), make_topology("complete", 5), period=1)
        for t in range(1, 101):
            x = x - 0.1 * torch.stack([problem.gradient(k, x, t) for k in range(5)]).mean(dim=0)
            twin.step()
            torch.testing.assert_close(twin.X, x.expand(5, -1), **CLOSE)

    @pytest.mark.parametrize("nesterov", [False, True])
    @pytest.mark.parametrize("momentum_sync", ["local", "average"])
    @pytest.mark.parametrize("seed", range(4))
    def test_the_average_follows_sgdm_on_the_mean_of_the_gradients(self, seed, momentum_sync, nesterov):
        """For any doubly stochastic W: a round moves no average, and the local rule is linear."""
        size = 2 + 3 * seed
        problem = noisy_quadratics(size, 6, sigma=1.0, seed=seed)
        means: list[Tensor] = []

        def recorded(worker: int, x: Tensor, step: int) -> Tensor:
            g = problem.gradient(worker, x, step)
            means[step - 1 :] = [g / size if worker == 0 else means[step - 1] + g / size]
            return g

        options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
        average = torch.ones(6, dtype=torch.float64)
        sgd = torch.optim.SGD([average], lr=0.02, **options)
        twin = PeriodicTwin(
            average,
            recorded,
            SGDM(0.02, **options),
            random_topology(size, rounds=3, seed=seed),
            period=3,
            global_every=4,
            momentum_sync=momentum_sync,
        )
        for t in range(100):
            twin.step()
            average.grad = means[t]
            sgd.step()
            torch.testing.assert_close(twin.mean, average, **CLOSE)
        assert twin.consensus_error > 1e-3  # the workers themselves are elsewhere

    def test_averaged_moments_agree_after_a_round_of_the_complete_graph(self):
        problem = noisy_quadratics(4, 6, sigma=1.0, seed=2)
        topology = make_topology("complete", 4)
        rule = SGDM(0.02, momentum=0.9)
        twin = PeriodicTwin(
            torch.ones(6, dtype=torch.float64),
            problem.gradient,
            rule,
            topology,
            period=2,
            momentum_sync="average",
        )
        for _ in range(10):
            twin.step()
            spread = (rule.state["m"] - rule.state["m"].mean(dim=0)).abs().max()
            assert (spread < 1e-12) == (twin.steps % 2 == 0)

    def test_adamw_moments_are_mixed_with_the_same_matrix(self):
        problem, topology = noisy_quadratics(3, 6, sigma=1.0), random_topology(3, 1, seed=0)
        local, mixed = AdamW(0.1), AdamW(0.1)
        x0 = torch.ones(6, dtype=torch.float64)
        PeriodicTwin(x0, problem.gradient, local, topology, period=1).step()
        PeriodicTwin(x0, problem.gradient, mixed, topology, period=1, momentum_sync="average").step()
        W = torch.from_numpy(topology.matrix(0).copy())
        for moment in ("m", "v"):
            torch.testing.assert_close(mixed.state[moment], W @ local.state[moment], **CLOSE)


class TestSchedule:
    @pytest.mark.parametrize(
        "period, warmup_steps, due",
        [
            (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
            (4, 0, [4, 8, 12]),
            (4, 4, [8, 12]),  # step 4 is still averaged exactly
            (4, 3, [4, 8, 12]),
            (5, 6, [10]),  # counted from step 0, not from the end of the warm-up
            ([(0, 2), (5, 3)], 0, [2, 4, 8, 11]),  # the second segment counts from step 5
            ([(0, 4), (4, 1), (6, 3)], 0, [4, 5, 6, 9, 12]),  # step 4 still belongs to the first segment
            ([(0, 1), (6, 2)], 9, [10, 12]),
        ],
    )
    def test_rounds_fall_on_these_steps(self, period, warmup_steps, due):
        twin = PeriodicTwin(
            torch.zeros(2),
            zero_gradient,
            SGDM(0.1),
            make_topology("ring", 4),
            period=period,
            warmup_steps=warmup_steps,
        )
        seen, rounds = [], 0
        for t in range(1, 13):
            twin.step()
            if twin.rounds > rounds:
                seen.append(t)
            rounds = twin.rounds
        assert seen == due

    def test_round_r_uses_the_rth_matrix_and_the_period_of_the_topology(self):
        topology = make_topology("one-peer-exponential", 8)
        x0 = torch.eye(8, dtype=torch.float64)  # row k shows whom worker k has heard of
        twin = PeriodicTwin(x0, zero_gradient, SGDM(0.1), topology, period=2)
        heard_of = []
        for _ in range(6):
            twin.step()
            heard_of.append(int((twin.X[0] > 0).sum()))
        assert heard_of == [1, 2, 2, 4, 4, 8]
        torch.testing.assert_close(twin.X, torch.full((8, 8), 1 / 8, dtype=torch.float64), **CLOSE)

    def test_every_hth_round_is_an_exact_average_and_counts_as_a_round(self):
        hops = make_topology("one-peer-exponential", 4)
        x0 = torch.eye(4, dtype=torch.float64)
        twin = PeriodicTwin(x0, zero_gradient, SGDM(0.1), hops, period=1, global_every=3)
        J = np.full((4, 4), 1 / 4)
        for W in (hops.matrix(0), hops.matrix(1), J, hops.matrix(3), hops.matrix(4), J):
            twin.X = x0  # so that W x0 = W
            twin.step()
            np.testing.assert_allclose(twin.X, W, atol=1e-15)

    def test_in_the_warmup_all_workers_are_one_worker_with_the_mean_gradient(self):
        problem = noisy_quadratics(4, 6, sigma=1.0, seed=5)
        x = torch.ones(6, dtype=torch.float64)
        twin = PeriodicTwin(x, problem.gradient, AdamW(0.05), make_topology("ring", 4), period=2, warmup_steps=20)
        adamw = torch.optim.AdamW([x], lr=0.05)
        for t in range(1, 21):
            x.grad = torch.stack([problem.gradient(k, x, t) for k in range(4)]).mean(dim=0)
            adamw.step()
            twin.step()
            torch.testing.assert_close(twin.X, x.expand(4, -1), **CLOSE)
        assert twin.rounds == 0
        twin.step()
        assert twin.consensus_error > 1e-6


class TestOuterMomentum:
    def test_by_hand(self):
        # Gradient 1, lr 1, beta 0.5, p = 1. Mixed -1: d = 1, v = 1, x = -1.5. Mixed -2.5: d = 1, v = 1.5, ...
        twin = PeriodicTwin(
            torch.zeros(1),
            lambda k, x, t: torch.ones_like(x),
            SGDM(1.0),
            make_topology("ring", 3),
            period=1,
            outer_momentum=0.5,
        )
        seen = []
        for _ in range(3):
            twin.step()
            seen.append(twin.mean.item())
        assert seen == pytest.approx([-1.5, -3.25, -5.125])

    def test_it_starts_where_the_warmup_ends(self):
        twin = PeriodicTwin(
            torch.zeros(1),
            lambda k, x, t: torch.ones_like(x),
            SGDM(1.0),
            make_topology("ring", 3),
            period=2,
            warmup_steps=3,
            outer_momentum=0.5,
        )
        for _ in range(4):
            twin.step()
        # Only the fourth step lies between x_prev = -3 and the round: d = 1, not 4.
        assert twin.mean.item() == pytest.approx(-4.5)

    def test_it_works_on_each_workers_own_parameters(self):
        topology = make_topology("ring", 4)
        x0 = torch.tensor([[0.0], [1.0], [5.0], [2.0]], dtype=torch.float64)
        twin = PeriodicTwin(x0, zero_gradient, SGDM(1.0), topology, period=1, outer_momentum=0.5)
        twin.step()
        mixed = torch.from_numpy(topology.matrix(0).copy()) @ x0
        torch.testing.assert_close(twin.X, mixed - 0.5 * (x0 - mixed), **CLOSE)


class TestRates:
    def test_stationary_error_times_workers_is_constant(self):
        """n workers average n independent noises: the stationary gradient of their mean is n times smaller.

        Per eigenvalue a, SGDM with noise of variance s^2 = sigma^2 / (d n) settles where
            a^2 Var = a lr s^2 (1 + momentum) / ((1 - momentum) (2 (1 + momentum) - lr a)).
        With common curvature the mean does not see the distances between the workers, hence any p and graph.
        """
        d, lr, momentum, sigma = 150, 0.02, 0.9, 1.0
        a = torch.linspace(0.3, 1.0, d, dtype=torch.float64)
        plus, minus = 1 + momentum, 1 - momentum
        expected = (a * lr * sigma**2 / d * plus / (minus * (2 * plus - lr * a))).sum().item()

        for size in (1, 2, 4, 8, 16):
            problem = noisy_quadratics(size, d, mu=0.3, common_curvature=True, sigma=sigma, seed=11)
            topology = make_topology("ring", size)
            twin = PeriodicTwin(problem.optimum, problem.gradient, SGDM(lr, momentum), topology, period=4)
            total, burn_in, steps = 0.0, 100, 500
            for t in range(burn_in + steps):
                twin.step()
                if t >= burn_in:
                    total += problem.mean_gradient(twin.mean).square().sum().item() / steps
            # 10 %: four times the sampling error (150 coordinates, some 30 independent times).
            assert total * size == pytest.approx(expected, rel=0.1)

    def test_consensus_error_obeys_the_bound_and_depends_on_lr_over_one_minus_momentum(self):
        """error <= 2 ratio^2 p^2 G^2 (1 + 4 / rho^2), with ratio = lr / (1 - momentum) and ||g|| <= G."""
        problem, topology = noisy_quadratics(8, 20, L=2.0, sigma=0.5, seed=7), make_topology("ring", 8)
        p, ratio, rho = 4, 0.05, spectral_gap(topology)
        tails = []
        for momentum in (0.0, 0.9):
            largest = 0.0

            def watched(worker: int, x: Tensor, step: int) -> Tensor:
                nonlocal largest
                g = problem.gradient(worker, x, step)
                largest = max(largest, g.square().sum().item())
                return g

            rule = SGDM(ratio * (1 - momentum), momentum)
            twin = PeriodicTwin(torch.zeros(20, dtype=torch.float64), watched, rule, topology, period=p)
            errors = []
            for _ in range(600):
                twin.step()
                errors.append(twin.consensus_error)
            assert max(errors) <= 2 * (ratio * p) ** 2 * largest * (1 + 4 / rho**2)
            tails.append(np.mean(errors[300:]))
        assert tails[1] == pytest.approx(tails[0], rel=0.1)  # both see the same noise: 2 % apart
