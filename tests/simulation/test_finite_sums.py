"""The finite sums: gradients against autograd, constants against what they bound, optima against the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decent_opt.simulation import breast_cancer, least_squares, logistic, split

SQUARES = least_squares(3, 7, 4, noise=0.5, heterogeneity=1.0, seed=1)
FEATURES = torch.from_numpy(np.random.default_rng(2).standard_normal((3, 7, 4)))
LABELS = FEATURES.sum(dim=2).sign()
PROBLEMS = {"least squares": SQUARES, "logistic": logistic(FEATURES, LABELS, kappa=50)}
X = torch.linspace(-1, 2, 4, dtype=torch.float64)


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


def test_gradients_are_those_of_the_value(problem) -> None:
    x = X.clone().requires_grad_()
    mean = problem.phi(problem.features @ x, problem.targets).mean() + problem.ridge / 2 * x.square().sum()
    mean.backward()
    assert float(mean.detach()) == pytest.approx(problem.value(X))
    torch.testing.assert_close(problem.gradients(X).mean(dim=0), x.grad)
    hessian = torch.func.hessian(
        lambda x: problem.phi(problem.features @ x, problem.targets).mean() + problem.ridge / 2 * x.square().sum()
    )
    torch.testing.assert_close(problem.hessian(X), hessian(X))


def test_one_workers_and_one_samples_gradients_add_up(problem) -> None:
    all_workers = problem.gradients(X)
    torch.testing.assert_close(torch.stack([problem.gradient(i, X) for i in range(3)]), all_workers)
    samples = problem.sample_gradients(X, torch.arange(21)).view(3, 7, 4)
    torch.testing.assert_close(samples.mean(dim=1), all_workers)
    assert problem.gradient(1, X.float()).dtype == torch.float32


def test_the_optimum(problem) -> None:
    assert problem.gradients(problem.optimum).mean(dim=0).norm() < 1e-14
    assert problem.value(problem.optimum) < problem.value(problem.optimum + 1e-4 * X)


def test_newton_finds_the_optimum_where_its_full_steps_do_not() -> None:
    hard = logistic(FEATURES, LABELS, kappa=1e6)  # separable: the optimum is far away, and the start flat
    assert hard.gradients(hard.optimum).mean(dim=0).norm() < 1e-14
    assert hard.optimum.norm() > 20


def test_constants_bound_the_curvature_and_are_reached(problem) -> None:
    each = [type(problem)(problem.features[i : i + 1], problem.targets[i : i + 1], problem.ridge) for i in range(3)]
    zero = torch.zeros(4, dtype=torch.float64)  # where the logistic loss bends most
    curvatures = [float(torch.linalg.eigvalsh(p.hessian(zero)).max()) for p in each]
    assert max(curvatures) == pytest.approx(problem.L)
    f = torch.linalg.eigvalsh(problem.hessian(zero))
    assert float(f.max()) == pytest.approx(problem.mean_L)
    assert problem.mean_L <= problem.L <= problem.sample_L
    rows = problem.features.flatten(0, 1).square().sum(dim=1)
    assert problem.sample_L == pytest.approx(problem.bend * float(rows.max()) + problem.ridge)
    smallest = float(torch.linalg.eigvalsh(problem.hessian(1000 * X)).min())
    assert problem.mu <= smallest * (1 + 1e-9)
    assert problem.mu == pytest.approx(smallest, rel=1e-6)


def test_kappa_of_the_logistic_loss() -> None:
    problem = PROBLEMS["logistic"]
    assert problem.L / problem.mu == pytest.approx(50)


class TestLeastSquares:
    def test_consistent_means_that_nobody_pulls_at_the_optimum(self) -> None:
        problem = least_squares(5, 3, 8, seed=3)
        assert problem.sample_gradients(problem.optimum, torch.arange(15)).abs().max() < 1e-12

    def test_orthogonal_noise_leaves_the_workers_at_rest_and_not_the_samples(self) -> None:
        problem = least_squares(3, 20, 8, noise=1.0, orthogonal=True, seed=3)
        assert problem.gradients(problem.optimum).abs().max() < 1e-12
        assert problem.sample_gradients(problem.optimum, torch.arange(60)).abs().mean() > 0.1

    @pytest.mark.parametrize("options", [{"noise": 1.0}, {"heterogeneity": 1.0}], ids=str)
    def test_otherwise_all_pull(self, options) -> None:
        problem = least_squares(3, 20, 8, seed=3, **options)
        assert problem.gradients(problem.optimum).norm(dim=1).min() > 0.1

    def test_kappa(self) -> None:
        problem = least_squares(4, 5000, 5, kappa=100, seed=3)
        assert problem.mean_L / problem.mu == pytest.approx(100, rel=0.1)  # 20000 rows: 1 % per eigenvalue

    def test_dissimilarity_bounds_and_is_reached(self) -> None:
        problem = least_squares(6, 10, 4, seed=3)

        def ratio(x: torch.Tensor) -> float:
            g = problem.gradients(x)
            return float(g.square().sum(dim=1).mean() / g.mean(dim=0).square().sum())

        directions = torch.from_numpy(np.random.default_rng(0).standard_normal((2000, 4)))
        ratios = [ratio(problem.optimum + direction) for direction in directions]
        assert 0.95 * problem.dissimilarity < max(ratios) <= problem.dissimilarity


def test_split_by_label_and_iid() -> None:
    features, labels = np.arange(86.0).reshape(43, 2), np.where(np.arange(43) % 2 == 0, 1.0, -1.0)
    a, b = split(features, labels, 4, by="label")
    assert a.shape == (4, 10, 2) and b.shape == (4, 10) and a.dtype == b.dtype == torch.float64
    assert [row.unique().numel() for row in b].count(1) >= 3  # the fourth may have the border
    shuffled, mixed = split(features, labels, 4)
    assert min(row.unique().numel() for row in mixed) == 2
    for rows, own in ((a, b), (shuffled, mixed)):  # labels stay with their rows, and no row comes twice
        numbers = (rows[..., 0] / 2).flatten()
        assert numbers.unique().numel() == 40
        assert torch.equal(own.flatten(), 1 - 2 * (numbers % 2))


def test_breast_cancer() -> None:
    pytest.importorskip("sklearn")
    features, labels = breast_cancer()
    assert features.shape == (569, 30) and set(labels) == {-1.0, 1.0}
    assert np.allclose(features.mean(axis=0), 0) and np.allclose(features.std(axis=0), 1)
