"""ISAGA: virtual and real ranks equal the matrix twins and a plain reference; the optimum, bytes, saving, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decent_opt import ISAGA, ConfigError
from decent_opt import simulation as twins
from decent_opt.compression.base import Key
from decent_opt.simulation import control_variates
from decent_opt.sparsification import BlockSampler
from decent_opt.testing import RankFailed, RankPool, run_ranks
from decent_opt.theory import isaga_step

D, ROWS, STEPS, SEED = 12, 5, 30, 4  # rows of a worker: tables are gone through several times
TOLERANCE = 1e-10  # float64; sums in another order


def problem_of(n: int, loss: str, ridge: float = 0.0) -> twins.FiniteSum:
    problem = twins.least_squares(n, ROWS, D, noise=1.0, heterogeneity=1.0, seed=3)
    if loss == "squared":
        return twins.LeastSquares(problem.features, problem.targets, ridge)
    return twins.Logistic(problem.features, problem.targets.sign(), ridge)


def data_of(problem: twins.FiniteSum, rank: int, data: str) -> tuple[Tensor, Tensor]:
    if data == "shared":
        return problem.features.flatten(0, 1), problem.targets.flatten()
    return problem.features[rank], problem.targets[rank]


def solve(rank: int, n: int, loss: Any, ridge: float, data: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """x after every step, and the table at the end."""
    features, labels = data_of(problem_of(n, loss, ridge), rank, data)
    options = {"block": 1, "seed": SEED, **options}
    solver = ISAGA(features, labels, loss=loss, l2=ridge, data=data, **options)
    path = []
    for _ in range(STEPS):
        solver.step()
        path.append(solver.x.clone())
    return torch.stack(path), solver.table


def draw(count: int, step: int, rank: int) -> int:
    return int(torch.randint(count, (1,), generator=Key(SEED, step, rank, 1).generator()))


def sampler_of(tau: float) -> BlockSampler:
    return BlockSampler.over(D, tau, block=1, seed=SEED)


def reference(n: int, problem: twins.FiniteSum, data: str, tau: float, lr: float) -> Tensor:
    """With tables of whole gradients, whose means are taken anew in every step; the ridge is no part of them."""
    sampler, x, path = sampler_of(tau), torch.zeros(D, dtype=torch.float64), []
    mask = twins.mask_of(sampler, D)
    rows, targets = problem.features.flatten(0, 1), problem.targets.flatten()
    table = torch.zeros_like(rows)
    for step in range(STEPS):
        total, new = torch.zeros_like(x), {}
        for i in range(n):
            j = draw(len(rows), step, i) if data == "shared" else i * ROWS + draw(ROWS, step, i)
            known = table if data == "shared" else table[i * ROWS : (i + 1) * ROWS]
            new[j] = problem.slope(rows[j] @ x, targets[j]) * rows[j]
            total += mask(i, step) * (new[j] - table[j] + known.mean(dim=0) + problem.ridge * x)
        for j, gradient in new.items():
            table[j] = gradient
        x = x - lr / n * total
        path.append(x)
    return torch.stack(path)


def default_lr(problem: twins.FiniteSum, n: int, tau: float) -> float:
    sampler = sampler_of(tau)
    return isaga_step(problem.sample_L, n, sampler.kept / sampler.blocks.count)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("data", ["distributed", "shared"])
def test_virtual_ranks_are_the_reference(n: int, loss: str, data: str) -> None:
    problem = problem_of(n, loss, 0.1)
    expected = reference(n, problem, data, 1 / n, default_lr(problem, n, 1 / n))
    assert float(expected[-1].norm()) > 0.01
    tables = []
    for aggregation in ("gather", "server"):
        for path, table in run_ranks(solve, n, "loopback", (n, loss, 0.1, data, {"aggregation": aggregation})):
            assert float((path - expected).abs().max()) <= TOLERANCE
            tables.append(table)
    if data == "shared":
        assert all(torch.equal(table, tables[0]) for table in tables)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("data", ["distributed", "shared"])
def test_virtual_ranks_are_the_matrix_twin(loss: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's shared table is refreshed where blocks are sent: the same with tau = 1."""

    def draws(workers: int, count: int, seed: int, step: int) -> Tensor:
        return torch.tensor([draw(count, step - 1, i) for i in range(workers)])

    monkeypatch.setattr(control_variates, "draw_samples", draws)
    n, tau = 4, 0.3 if data == "distributed" else 1.0
    problem, x0 = problem_of(n, loss), torch.zeros(D, dtype=torch.float64)
    kind: Any = twins.ISAGA if data == "distributed" else twins.SharedISAGA
    twin = kind(x0, problem, twins.mask_of(sampler_of(tau), D), lr=default_lr(problem, n, tau))
    expected = []
    for _ in range(STEPS):
        twin.step()
        expected.append(twin.x)
    for path, _ in run_ranks(solve, n, "loopback", (n, loss, 0.0, data, {"tau": tau})):
        assert float((path - torch.stack(expected)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("data", ["distributed", "shared"])
def test_real_ranks_and_both_ways_are_equal_to_the_bit(ranks: RankPool, n: int, data: str) -> None:
    found = []
    for aggregation in ("gather", "server"):
        args = (n, "logistic", 0.1, data, {"aggregation": aggregation, "masks": "permutation"})
        found += [path for path, _ in ranks.run(solve, n, args) + run_ranks(solve, n, "loopback", args)]
    assert all(torch.equal(path, found[0]) for path in found)


def _long(rank: int, data: Any, orthogonal: bool) -> float:
    problem = twins.least_squares(4, 10, 6, noise=1.0, orthogonal=orthogonal, heterogeneity=0.0, seed=5)
    solver = ISAGA(*data_of(problem, rank, data), data=data, tau=0.25, block=1)
    for _ in range(2500):
        solver.step()
    exact = solver.table @ solver.features / len(solver.table)
    assert float((solver.state_dict()["mean"] - exact).abs().max()) <= 1e-14  # 2500 changes have left no trace
    return float((solver.x - problem.optimum).norm() / problem.optimum.norm())


@pytest.mark.parametrize(
    ("data", "orthogonal", "reached"),
    [("shared", False, True), ("distributed", True, True), ("distributed", False, False)],
)
def test_it_reaches_the_optimum_where_it_should(data: str, orthogonal: bool, reached: bool) -> None:
    """Distributed data need grad f_i = 0 for every worker, which orthogonal noise gives; samples' gradients stay."""
    for distance in run_ranks(_long, 4, "loopback", (data, orthogonal)):
        assert (distance < 1e-8) if reached else (distance > 1e-3)


def _bytes(rank: int, n: int, data: Any, aggregation: Any) -> tuple[int, int]:
    features, labels = data_of(problem_of(n, "squared"), rank, data)
    solver = ISAGA(features.float(), labels, data=data, tau=0.25, block=2, aggregation=aggregation)
    solver.step()
    return sum(solver.traffic.sent.values()), sum(solver.traffic.received.values())


@pytest.mark.parametrize("data", ["distributed", "shared"])
def test_bytes(data: str) -> None:
    """With shared data one number along, and all n of them back from the server."""
    n, along = 4, int(data == "shared")
    sampler = BlockSampler.over(D, 0.25, block=2)
    own = 4 * (sampler.kept * sampler.blocks.room(torch.tensor([0])) + along)
    whole = 4 * (D + n * along)
    assert run_ranks(_bytes, n, "loopback", (n, data, "gather")) == [((n - 1) * own, (n - 1) * own)] * n
    served = run_ranks(_bytes, n, "loopback", (n, data, "server"))
    assert served == [((n - 1) * whole, (n - 1) * own)] + [(own, whole)] * (n - 1)


def _resume(rank: int, data: Any) -> tuple[bool, str, str]:
    features, labels = data_of(problem_of(2, "logistic"), rank, data)

    def fresh(**options: Any) -> ISAGA:
        x0 = torch.full((D,), 0.1 + rank, dtype=torch.float64)  # rank 0's counts
        return ISAGA(features, labels, loss="logistic", data=data, **{"x0": x0, **options})

    def run(solver: ISAGA, steps: int) -> Tensor:
        for _ in range(steps):
            solver.step()
        return solver.x.clone()

    first, second = fresh(), fresh(x0=None)
    assert bool((first.x == 0.1).all())
    run(first, 7)
    saved = first.state_dict()
    assert all(isinstance(value, (int, float, Tensor)) for value in saved.values())
    expected = run(first, 20)
    same = True
    for _ in range(2):  # the second time shows that running has not changed what was saved
        second.load_state_dict(saved)
        same &= torch.equal(run(second, 20), expected) and torch.equal(second.table, first.table)
    with pytest.raises(ConfigError) as other_seed:
        fresh(seed=1).load_state_dict(saved)
    second.load_state_dict(saved if rank else first.state_dict())
    with pytest.raises(ConfigError) as other_step:
        second.step()
    return same, str(other_seed.value), str(other_step.value)


@pytest.mark.parametrize("data", ["distributed", "shared"])
def test_a_saved_state_goes_on_exactly(data: str) -> None:
    for same, other_seed, other_step in run_ranks(_resume, 2, "loopback", (data,)):
        assert same and other_seed == "state_dict: seed is 0, but here it is 1"
        assert other_step.startswith("step: rank") and other_step.endswith("every rank needs the same")


def _make(rank: int, on_rank_1: dict[str, Any]) -> None:
    options = {"features": torch.ones(4, 3), "labels": torch.ones(4), **(on_rank_1 if rank == 1 else {})}
    ISAGA(options.pop("features"), options.pop("labels"), **{"data": "shared", **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss": "hinge"}, "loss: allowed are squared, logistic, got 'hinge'"),
        ({"data": "private"}, "data: allowed are distributed, shared, got 'private'"),
        ({"l2": -1}, "l2: must be a finite number from 0 on, got -1"),
        ({"lr": 0.0}, "lr: must be a finite number above 0, or None, got 0.0"),
        ({"tau": 0}, "tau: must be a number above 0 and up to 1, got 0"),
        ({"aggregation": "ring"}, "aggregation: allowed are gather, server, got 'ring'"),
        (
            {"features": torch.ones(4)},
            "features: must be rows of one length, float32 or float64, at least one, got shape",
        ),
        ({"labels": torch.ones(3)}, "labels: must be one per row, 4, got shape (3,)"),
        ({"labels": torch.zeros(4), "loss": "logistic"}, "labels: must be -1 or 1 for the logistic loss"),
        ({"x0": torch.ones(4)}, "x0: must be a tensor of shape (3,), got torch.Size([4])"),
    ],
)
def test_refusals_reach_every_rank(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RankFailed) as error:
        run_ranks(_make, 2, "loopback", (options,), timeout=20)
    assert sentence in error.value.reports[1] and "rank 1 refused its configuration" in error.value.reports[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"features": 2 * torch.ones(4, 3)}, "rows"), ({"l2": 0.5}, "l2"), ({"lr": 0.1}, "lr"), ({"seed": 3}, "seed")],
)
def test_ranks_agree(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RankFailed) as error:
        run_ranks(_make, 2, "loopback", (options,), timeout=20)
    assert all(f"{field}: rank" in report for report in error.value.reports.values())


def test_nothing_to_learn_from_has_no_default_step() -> None:
    with pytest.raises(ConfigError, match="lr: features are zero on all workers"):
        ISAGA(torch.zeros(4, 3), torch.ones(4))
