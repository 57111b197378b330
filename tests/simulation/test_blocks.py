"""The m/n block methods: identities path by path, and the experiments that their theory predicts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from decent_opt.simulation import (
    DIANA,
    IASGD,
    IBCD,
    ISAGA,
    ISEGA,
    ISGD,
    ErrorFeedback,
    SharedISAGA,
    breast_cancer,
    coordinate_mask,
    everything,
    l1_prox,
    least_squares,
    logistic,
    mask_of,
    one_sample,
    split,
    steps_until,
)
from decent_opt.simulation.blocks import draw_samples
from decent_opt.sparsification import BlockSampler
from decent_opt.theory import (
    ibcd_slowdown,
    ibcd_step,
    isaga_step,
    isega_practical_step,
    nesterov_constants,
    sparsified_dissimilarity,
)

# Identities hold up to the rounding of float64: 1e-12 after a hundred steps on numbers of size 1.
CLOSE = {"rtol": 0.0, "atol": 1e-12}
N, D = 5, 12
PROBLEM = least_squares(N, 6, D, noise=0.5, heterogeneity=1.0, seed=1)
LR = 0.3 / PROBLEM.L
START = torch.linspace(-1, 1, D, dtype=torch.float64)
ALL = everything(D)


def zeros(dimension: int) -> Tensor:
    return torch.zeros(dimension, dtype=torch.float64)


class TestIdentities:
    @pytest.mark.parametrize("kind", ["IBCD", "ISEGA", "DIANA", "error feedback"])
    def test_with_everything_sent_it_is_gradient_descent(self, kind) -> None:
        x = START
        twin = {
            "IBCD": lambda: IBCD(x, PROBLEM.gradients, N, ALL, lr=LR),
            "ISEGA": lambda: ISEGA(x, PROBLEM.gradients, N, ALL, tau=1.0, lr=LR),
            "DIANA": lambda: DIANA(x, PROBLEM.gradients, N, ALL, tau=1.0, lr=LR, alpha=1.0),
            "error feedback": lambda: ErrorFeedback(x, PROBLEM.gradients, N, ALL, lr=LR),
        }[kind]()
        for _ in range(100):
            x = x - LR * PROBLEM.gradients(x).mean(dim=0)
            twin.step()
            torch.testing.assert_close(twin.x, x, **CLOSE)
        assert twin.sent == 100 * D

    def test_with_everything_sent_isgd_is_sgd(self) -> None:
        x, oracle = START, one_sample(PROBLEM, shared=True, seed=3)
        twin = ISGD(x, oracle, N, ALL, lr=lambda t: LR / (1 + t))
        for t in range(100):
            x = x - LR / (1 + t) * oracle(x, t + 1).mean(dim=0)
            twin.step()
            torch.testing.assert_close(twin.x, x, **CLOSE)

    def test_with_everything_sent_iasgd_is_accelerated_gradient_descent(self) -> None:
        """In its usual form y = x + (1 - theta)/(1 + theta) (x - x_previous), x <- y - grad f(y) / L."""
        constants = nesterov_constants(PROBLEM.mean_L, PROBLEM.mu, growth=1.0)
        twin = IASGD(START, PROBLEM.gradients, N, ALL, tau=1.0, constants=constants)
        theta = (PROBLEM.mu / PROBLEM.mean_L) ** 0.5
        x = previous = START
        for _ in range(100):
            y = x + (1 - theta) / (1 + theta) * (x - previous)
            x, previous = y - PROBLEM.gradients(y).mean(dim=0) / PROBLEM.mean_L, x
            twin.step()
            torch.testing.assert_close(twin.x, x, **CLOSE)

    @pytest.mark.parametrize("refresh", ["full", "masked"])
    def test_with_everything_sent_by_one_worker_isaga_is_saga(self, refresh) -> None:
        alone = least_squares(1, 20, D, noise=0.5, seed=2)
        lr = isaga_step(alone.sample_L, 1, 1.0)
        own = ISAGA(START, alone, ALL, lr=lr, refresh=refresh, seed=4)
        shared = SharedISAGA(START, alone, ALL, lr=lr, seed=4)
        x, table = START, [zeros(D) for _ in range(20)]
        for t in range(1, 101):
            j = int(draw_samples(1, 20, 4, t))
            g = alone.features[0, j] * (alone.features[0, j] @ x - alone.targets[0, j])
            x = x - lr * (g - table[j] + sum(table) / 20)
            table[j] = g
            own.step()
            shared.step()
            torch.testing.assert_close(own.x, x, **CLOSE)
            torch.testing.assert_close(shared.x, x, **CLOSE)

    @pytest.mark.parametrize("masks", ["independent", "permutation", "shared"])
    def test_isega_is_diana_with_random_coordinates(self, masks) -> None:
        sampler = BlockSampler.over(D, 0.25, block=1, masks=masks, seed=5)
        tau = sampler.kept / sampler.blocks.count
        mask = mask_of(sampler, D)
        isega = ISEGA(START, PROBLEM.gradients, N, mask, tau=tau, lr=LR)
        diana = DIANA(START, PROBLEM.gradients, N, mask, tau=tau, lr=LR, alpha=tau)
        for _ in range(300):
            isega.step()
            diana.step()
            torch.testing.assert_close(diana.x, isega.x, **CLOSE)
            torch.testing.assert_close(diana.H, isega.H, **CLOSE)
        assert (isega.x - START).norm() > 0.1

    def test_error_feedback_loses_nothing(self) -> None:
        """x - lr mean(e) moves by all gradients, whatever is sent."""
        twin = ErrorFeedback(START, PROBLEM.gradients, N, coordinate_mask(N, D, 3), lr=LR)
        virtual = START
        for _ in range(100):
            virtual = virtual - LR * PROBLEM.gradients(twin.x).mean(dim=0)
            twin.step()
            torch.testing.assert_close(twin.x - LR * twin.errors.mean(dim=0), virtual, **CLOSE)
        assert twin.errors.norm() > 0.1

    def test_masked_table_rows_are_renewed_only_where_they_are_sent(self) -> None:
        """Two workers draw the same sample and send different coordinates of it."""
        problem = least_squares(2, 1, 4, noise=1.0, seed=6)
        rows = torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.float64)
        own = ISAGA(zeros(4), problem, lambda i, t: rows[i], lr=0.1, refresh="masked")
        own.step()
        torch.testing.assert_close(own.table[:, 0], rows * problem.gradients(zeros(4)), **CLOSE)
        shared = SharedISAGA(zeros(4), problem, lambda i, t: rows[i], lr=0.1)
        shared.step()
        union = zeros(4) + torch.tensor([1, 0, 1, 1])
        j = draw_samples(2, 2, 0, 1)
        expected = zeros(8).view(2, 4)
        for worker, sample in enumerate(j):
            expected[sample] = expected[sample].where(rows[worker] == 0, problem.gradient(int(sample), zeros(4)))
        torch.testing.assert_close(shared.table, expected, **CLOSE)
        if j[0] == j[1]:
            assert torch.equal(expected[j[0]] != 0, union > 0)

    def test_an_l1_penalty_is_minimised(self) -> None:
        """0 lies in grad f(x) + weight sign(x), coordinate by coordinate."""
        weight = 0.4 * float(PROBLEM.gradients(zeros(D)).mean(dim=0).abs().max())
        mask = coordinate_mask(N, D, 3)
        lr = isega_practical_step(PROBLEM.L, N, 0.25)
        twin = ISEGA(zeros(D), PROBLEM.gradients, N, mask, tau=0.25, lr=lr, prox=l1_prox(weight))
        for _ in range(6000):
            twin.step()
        g, zero = PROBLEM.gradients(twin.x).mean(dim=0), twin.x == 0
        assert 0 < zero.sum() < D
        torch.testing.assert_close(g[~zero], -weight * twin.x[~zero].sign(), rtol=0, atol=1e-8)
        assert g[zero].abs().max() <= weight


class TestMasks:
    @pytest.mark.parametrize("masks", ["independent", "permutation", "shared"])
    def test_all_at_once_or_by_the_sampler_the_law_is_the_same(self, masks) -> None:
        sampled = mask_of(BlockSampler.over(8, 0.25, block=1, masks=masks), 8)
        for mask in (sampled, coordinate_mask(3, 8, 2, masks=masks)):
            drawn = torch.stack([torch.stack([mask(i, t) for i in range(3)]) for t in range(2000)])
            assert torch.equal(drawn.sum(dim=2), torch.full((2000, 3), 2.0, dtype=torch.float64))
            assert (drawn.mean(dim=0) - 0.25).abs().max() < 0.04  # four standard errors
            both = {"independent": 0.0625, "permutation": 0.0, "shared": 0.25}[masks]
            assert float((drawn[:, 0] * drawn[:, 2]).mean()) == pytest.approx(both, abs=0.01)

    def test_blocks_of_any_length(self) -> None:
        sampler = BlockSampler.over(10, 0.5, block=(3, 1, 4, 2))
        row = mask_of(sampler, 10)(1, 6)
        pieces = row.split((3, 1, 4, 2))
        assert [i for i, piece in enumerate(pieces) if piece.all()] == sampler.chosen(6, 1).tolist()
        assert all(piece.unique().numel() == 1 for piece in pieces)


def iterations(problem, kept: int, *, masks="independent", seed: int = 0) -> tuple[int, float]:
    """Steps of IBCD until ||x - x*||^2 has fallen to 1e-8 of its start, and numbers sent by a worker."""
    n, d = problem.workers, problem.features.shape[2]
    tau = kept / d
    lr = 1 / problem.L if masks == "shared" else ibcd_step(problem.L, n, tau)
    mask = everything(d) if kept == d else coordinate_mask(n, d, kept, masks=masks, seed=seed)
    twin = IBCD(zeros(d), problem.gradients, n, mask, lr=lr)
    steps = steps_until(twin, problem.optimum, below=1e-8, limit=30000)
    assert steps is not None
    return steps, twin.sent


class TestIBCD:
    """Consistent least squares. Single problems scatter, from 1.9 to 2.4 at tau = 1/n: these are means over several."""

    def test_the_price_of_tau_is_at_most_two_and_one_percent_of_the_blocks_send_a_48th_of_the_numbers(self) -> None:
        problems = [least_squares(100, 6, 100, seed=seed) for seed in range(6)]
        dense = [iterations(problem, 100) for problem in problems]
        for kept in (20, 10, 5, 2, 1):
            sparse = [iterations(problem, kept, seed=seed) for seed, problem in enumerate(problems)]
            ratio = sum(some / all_ for (some, _), (all_, _) in zip(sparse, dense, strict=True)) / 6
            assert ratio == pytest.approx(ibcd_slowdown(100, kept / 100), rel=0.1)
        assert 1.85 <= ratio <= 2.15
        assert sum(all_ for _, all_ in dense) / sum(some for _, some in sparse) >= 45

    @pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
    def test_the_price_over_n(self, n) -> None:
        ratios = []
        for seed in range(3):
            problem = least_squares(n, 4 * 128 // n, 128, seed=seed)
            ratios.append(iterations(problem, 128 // n, seed=seed)[0] / iterations(problem, 128)[0])
        assert sum(ratios) / 3 == pytest.approx(2 - 1 / n, rel=0.1)

    @pytest.mark.parametrize("kept", [20, 10])
    def test_one_mask_for_all_costs_one_over_tau(self, kept) -> None:
        problem = least_squares(100, 4, 100)
        ratio = iterations(problem, kept, masks="shared")[0] / iterations(problem, 100)[0]
        assert ratio == pytest.approx(100 / kept, rel=0.05)

    def test_where_f_is_much_smoother_than_its_parts_the_price_is_that_much_higher(self) -> None:
        """Gradient descent may then take 1 / L_f, and "at most twice" no longer holds."""
        n, problem = 20, least_squares(20, 4, 20)
        spread = problem.L / problem.mean_L
        steps = []
        for tau in (1.0, 1 / n):
            mask = coordinate_mask(n, n, round(tau * n))
            twin = IBCD(zeros(n), problem.gradients, n, mask, lr=ibcd_step(problem.L, n, tau, mean_L=problem.mean_L))
            steps.append(steps_until(twin, problem.optimum, below=1e-8, limit=9999))
        assert 4 < steps[1] / steps[0] < ibcd_slowdown(n, 1 / n, spread)


@pytest.fixture(scope="module")
def data():
    pytest.importorskip("sklearn")
    return breast_cancer()


class TestISEGA:
    def test_it_converges_on_sorted_labels_where_ibcd_stalls(self, data) -> None:
        n, d, tau = 20, 30, 2 / 30
        problem = logistic(*split(*data, n, by="label"), kappa=100)
        mask = coordinate_mask(n, d, 2)
        isega = ISEGA(zeros(d), problem.gradients, n, mask, tau=tau, lr=isega_practical_step(problem.L, n, tau))
        assert steps_until(isega, problem.optimum, below=1e-8, limit=3000) is not None
        ibcd = IBCD(zeros(d), problem.gradients, n, mask, lr=ibcd_step(problem.L, n, tau))
        assert steps_until(ibcd, problem.optimum, below=1e-4, limit=3000) is None

    @pytest.mark.parametrize("by", ["iid", "label"])
    def test_where_kappa_is_large_it_costs_twice_the_iterations(self, data, by) -> None:
        n, d, tau = 20, 30, 2 / 30
        problem = logistic(*split(*data, n, by=by), kappa=500)
        descent = IBCD(zeros(d), problem.gradients, n, everything(d), lr=1 / problem.L)
        dense = steps_until(descent, problem.optimum, below=1e-8, limit=9999)
        lr = isega_practical_step(problem.L, n, tau)
        isega = ISEGA(zeros(d), problem.gradients, n, coordinate_mask(n, d, 2), tau=tau, lr=lr)
        assert steps_until(isega, problem.optimum, below=1e-8, limit=9999) <= 2.3 * dense
        assert isega.sent < descent.sent / 6


class TestISAGA:
    N, D, KEPT = 10, 20, 2

    def slopes(self, twin, optimum: Tensor, steps: int) -> list[float]:
        """By how much log10 ||x - x*||^2 falls in each third of these steps."""
        logs = [float((twin.x - optimum).square().sum().log10())]
        for _ in range(3):
            for _ in range(steps // 3):
                twin.step()
            logs.append(float((twin.x - optimum).square().sum().log10()))
        return [a - b for a, b in pairwise(logs)]

    @pytest.mark.parametrize("refresh", ["full", "masked"])
    def test_with_data_of_their_own_it_converges_linearly(self, refresh) -> None:
        problem = least_squares(self.N, 30, self.D, noise=1.0, orthogonal=True, seed=7)
        lr = isaga_step(problem.sample_L, self.N, self.KEPT / self.D)
        mask = coordinate_mask(self.N, self.D, self.KEPT)
        twin = ISAGA(zeros(self.D), problem, mask, lr=lr, refresh=refresh)
        slopes = self.slopes(twin, problem.optimum, 3000 if refresh == "full" else 6000)
        assert sum(slopes) > 8 and min(slopes) > 0.5 * max(slopes)

    def test_with_shared_data_it_converges_linearly_whatever_the_gradients_at_the_optimum(self) -> None:
        problem = least_squares(self.N, 10, self.D, noise=1.0, heterogeneity=0.5, seed=7)
        lr = isaga_step(problem.sample_L, self.N, self.KEPT / self.D)
        twin = SharedISAGA(zeros(self.D), problem, coordinate_mask(self.N, self.D, self.KEPT), lr=lr)
        slopes = self.slopes(twin, problem.optimum, 6000)
        assert sum(slopes) > 8 and min(slopes) > 0.5 * max(slopes)

    def test_with_data_of_their_own_that_disagree_it_stalls(self) -> None:
        problem = least_squares(self.N, 30, self.D, heterogeneity=0.5, seed=7)
        lr = isaga_step(problem.sample_L, self.N, self.KEPT / self.D)
        twin = ISAGA(zeros(self.D), problem, coordinate_mask(self.N, self.D, self.KEPT), lr=lr)
        assert steps_until(twin, problem.optimum, below=1e-4, limit=4000) is None

    def test_many_samples_and_a_small_kappa_make_it_slow(self) -> None:
        """The table has to be renewed: one pass takes 1/tau times longer than with everything sent."""
        problem = least_squares(self.N, 60, self.D, noise=1.0, seed=7)
        steps = []
        for kept in (self.D, self.KEPT):
            lr = isaga_step(problem.sample_L, self.N, kept / self.D)
            twin = SharedISAGA(zeros(self.D), problem, coordinate_mask(self.N, self.D, kept), lr=lr)
            steps.append(steps_until(twin, problem.optimum, below=1e-8, limit=20000))
        assert 5 < steps[1] / steps[0] < 15


def test_iasgd_beats_isgd_where_the_condition_is_bad_and_the_workers_agree() -> None:
    n = d = 20
    problem = least_squares(n, 500, d, kappa=100, seed=0)
    growth = sparsified_dissimilarity(problem.dissimilarity, n, 1 / n)
    constants = nesterov_constants(problem.mean_L, problem.mu, growth)
    plain = ISGD(zeros(d), problem.gradients, n, coordinate_mask(n, d, 1), lr=ibcd_step(problem.L, n, 1 / n))
    fast = IASGD(zeros(d), problem.gradients, n, coordinate_mask(n, d, 1), tau=1 / n, constants=constants)
    slow = steps_until(plain, problem.optimum, below=1e-8, limit=5000)
    assert steps_until(fast, problem.optimum, below=1e-8, limit=5000) < slow / 5


def test_error_feedback_goes_on_where_ibcd_stalls_but_not_to_the_optimum() -> None:
    problem = least_squares(10, 6, 10, heterogeneity=1.0, seed=8)
    left = {}
    for kind, lr in ((IBCD, ibcd_step(problem.L, 10, 0.1)), (ErrorFeedback, 0.1 / problem.L)):
        twin = kind(zeros(10), problem.gradients, 10, coordinate_mask(10, 10, 1), lr=lr)
        for _ in range(3000):
            twin.step()
        left[kind] = float((twin.x - problem.optimum).square().sum() / problem.optimum.square().sum())
    assert 1e-12 < left[ErrorFeedback] < left[IBCD] / 10
