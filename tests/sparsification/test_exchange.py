"""Sums and means of m/n blocks: loopback and gloo equal the matrix twins, bytes equal the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decent_opt.communication import connect
from decent_opt.errors import ConfigError
from decent_opt.simulation import IBCD, ISEGA, ErrorFeedback, LeastSquares, everything, least_squares, mask_of
from decent_opt.sparsification import BlockExchange, BlockMean, BlockSampler
from decent_opt.testing import RankFailed, RankPool, run_ranks

STEPS, D, LR = 30, 50, 0.02
# Float64; the twins add in another order, and 30 contracting steps do not let 1e-16 grow.
TOLERANCE = 1e-10
AGGREGATIONS = ("gather", "server")
ESTIMATORS = ("unbiased", "error_feedback", "control_variate")


def problem_of(n: int) -> LeastSquares:
    return least_squares(n, 12, D, noise=1.0, heterogeneity=1.0, seed=1)


def descend(rank: int, n: int, options: dict[str, Any]) -> tuple[Tensor, list[tuple[int, int]]]:
    """x after every step, (STEPS, d), and the bytes that every step has sent and received."""
    problem, mean, x = problem_of(n), BlockMean(D, **{"block": 3, **options}), torch.zeros(D, dtype=torch.float64)
    path, bytes_ = [], []
    for _ in range(STEPS):
        g = problem.gradient(rank, x)
        assert mean.mean_(g) is g
        x = x - LR * g
        path.append(x)
        bytes_.append((sum(mean.traffic.sent.values()), sum(mean.traffic.received.values())))
    assert mean.steps == STEPS
    return torch.stack(path), bytes_


def twin_of(n: int, estimator: str, tau: float, masks: Any) -> Tensor:
    problem, x0 = problem_of(n), torch.zeros(D, dtype=torch.float64)
    sampler = BlockSampler.over(D, tau, block=3, masks=masks)
    mask, exact = mask_of(sampler, D), sampler.kept / sampler.blocks.count
    twin: Any
    if estimator == "unbiased":
        twin = IBCD(x0, problem.gradients, n, mask, lr=LR / exact)
    elif estimator == "error_feedback":
        twin = ErrorFeedback(x0, problem.gradients, n, mask, lr=LR)
    else:
        twin = ISEGA(x0, problem.gradients, n, mask, tau=exact, lr=LR)
    path = []
    for _ in range(STEPS):
        twin.step()
        path.append(twin.x)
    return torch.stack(path)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("masks", ["independent", "permutation", "shared"])
def test_virtual_ranks_are_the_twin(n: int, estimator: str, masks: str) -> None:
    twin = twin_of(n, estimator, 1 / n, masks)
    for aggregation in AGGREGATIONS:
        options = {"estimator": estimator, "masks": masks, "aggregation": aggregation}
        for path, _ in run_ranks(descend, n, "loopback", (n, options), timeout=60):
            assert float((path - twin).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_real_ranks_and_both_ways_are_equal_to_the_bit(ranks: RankPool, n: int, estimator: str) -> None:
    twin = twin_of(n, estimator, 0.3, "independent")
    found = []
    for aggregation in AGGREGATIONS:
        args = (n, {"estimator": estimator, "tau": 0.3, "aggregation": aggregation})
        found += [p for p, _ in ranks.run(descend, n, args) + run_ranks(descend, n, "loopback", args, timeout=60)]
    assert all(torch.equal(path, found[0]) for path in found)
    assert float((found[0] - twin).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("n", [2, 4])
def test_bytes(ranks: RankPool, n: int) -> None:
    sampler = BlockSampler.over(D, 1 / n, block=3)
    own, whole = sampler.kept * 3 * 8, D * 8
    for run in (ranks.run, lambda *a: run_ranks(a[0], a[1], "loopback", a[2])):
        for _, steps in run(descend, n, (n, {"aggregation": "gather"})):
            assert steps == [((n - 1) * own, (n - 1) * own)] * STEPS
        served = run(descend, n, (n, {"aggregation": "server"}))
        assert served[0][1] == [((n - 1) * whole, (n - 1) * own)] * STEPS
        assert all(steps == [(own, whole)] * STEPS for _, steps in served[1:])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_with_everything_sent_it_is_gradient_descent(estimator: str) -> None:
    problem, x0 = problem_of(4), torch.zeros(D, dtype=torch.float64)
    twin = IBCD(x0, problem.gradients, 4, everything(D), lr=LR)
    for _ in range(STEPS):
        twin.step()
    for path, _ in run_ranks(descend, 4, "loopback", (4, {"tau": 1.0, "estimator": estimator})):
        assert float((path[-1] - twin.x).abs().max()) <= TOLERANCE


def test_one_worker_leaves_a_vector_as_it_is() -> None:
    for estimator in ESTIMATORS:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            g = torch.randn(D, generator=torch.Generator().manual_seed(0)).to(dtype)
            mean = BlockMean(D, estimator=estimator)  # type: ignore[arg-type]
            assert torch.equal(mean.mean_(g.clone()), g)
            assert mean.traffic.sent == mean.traffic.received == {}


def _uneven(rank: int, aggregation: Any, dtype: torch.dtype) -> bool:
    """Blocks of any length; what is sent is the part of this worker; along goes to all; v stays."""
    transport = connect()
    exchange = BlockExchange(transport, aggregation)
    sampler = BlockSampler.over(20, 0.5, block=(7, 1, 9, 3), seed=2)
    v = [torch.randn(20, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(transport.size)]
    good = True
    for step in range(5):
        masks = [mask_of(sampler, 20)(i, step).to(dtype) for i in range(transport.size)]
        before, sent = v[rank].clone(), torch.full((20,), 9.0, dtype=dtype)
        total, numbers = exchange.sum_and_gather(sampler, v[rank], step, torch.tensor([rank, step]).to(dtype), sent)
        good &= torch.equal(v[rank], before) and torch.equal(sent, masks[rank] * before)
        good &= numbers.tolist() == [[i, step] for i in range(transport.size)]
        expected = torch.zeros(20, dtype=dtype)
        for mask, vector in zip(masks, v, strict=True):
            expected += mask * vector
        good &= torch.equal(total, expected) and torch.equal(exchange.sum(sampler, v[rank], step), expected)
    return good


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uneven_blocks_and_numbers_along(ranks: RankPool, aggregation: str, dtype: torch.dtype) -> None:
    assert all(ranks.run(_uneven, 4, (aggregation, dtype)))
    assert all(run_ranks(_uneven, 3, "loopback", (aggregation, dtype)))
    assert run_ranks(_uneven, 1, "loopback", (aggregation, dtype)) == [True]


def _resume(rank: int, estimator: Any) -> tuple[bool, str]:
    def run(mean: BlockMean, steps: range) -> Tensor:
        gradients = [torch.randn(D, generator=torch.Generator().manual_seed(100 * s + rank)) for s in steps]
        return torch.stack([mean.mean_(g) for g in gradients])

    first, second = BlockMean(D, 0.3, estimator, seed=3), BlockMean(D, 0.3, estimator, seed=3)
    second.load_state_dict(first.state_dict())  # of nothing
    run(first, range(4))
    saved = first.state_dict()
    assert all(isinstance(value, (int, Tensor)) for value in saved.values())
    expected = run(first, range(4, 8))
    second.load_state_dict(saved)
    same = torch.equal(run(second, range(4, 8)), expected)
    second.load_state_dict(saved)  # running has not changed what was saved
    same &= torch.equal(run(second, range(4, 8)), expected)
    second.load_state_dict(saved if rank else first.state_dict())
    with pytest.raises(ConfigError) as error:
        run(second, range(1))
    return same, str(error.value)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_saved_state_goes_on_exactly_and_steps_are_compared(estimator: str) -> None:
    results = run_ranks(_resume, 2, "loopback", (estimator,), timeout=30)
    assert all(same for same, _ in results)
    assert [sentence for _, sentence in results] == [
        "step: rank 0 has 8, rank 1 has 4; every rank needs the same",
        "step: rank 1 has 4, rank 0 has 8; every rank needs the same",
    ]


def test_states_of_something_else_are_refused() -> None:
    saved = BlockMean(D, 0.3, "error_feedback").state_dict()
    for field, other in {"rank": 1, "workers": 2, "numel": 7, "kept": 1, "seed": 5}.items():
        with pytest.raises(ConfigError, match=f"state_dict: {field} is {other}, but here it is"):
            BlockMean(D, 0.3).load_state_dict({**saved, field: other})
    with pytest.raises(ConfigError, match="remembers nothing, but the estimator here needs residuals"):
        BlockMean(D, 0.3, "error_feedback").load_state_dict({**saved, "steps": 1})


def _overflow(rank: int, estimator: Any) -> tuple[bool, bool, bool]:
    mean = BlockMean(D, 0.5, estimator)
    mean.mean_(torch.full((D,), 1.0 + rank))
    before = mean.state_dict()
    g = torch.ones(D)
    if rank == 1:
        g[7] = float("inf")
    finite = bool(mean.mean_(g).isfinite().all())
    kept = all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(before[k]))
        for k, v in mean.state_dict().items()
        if k != "steps"
    )
    return finite, kept, bool(mean.mean_(torch.ones(D)).isfinite().all())


@pytest.mark.parametrize("estimator", ESTIMATORS[1:])
def test_memories_do_not_learn_what_is_not_finite(estimator: str) -> None:
    assert run_ranks(_overflow, 3, "loopback", (estimator,)) == [(False, True, True)] * 3


def _make(rank: int, on_rank_1: dict[str, Any], on_all: dict[str, Any]) -> None:
    BlockMean(**{"numel": D, **on_all, **(on_rank_1 if rank == 1 else {})})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tau": 2}, "tau: must be a number above 0 and up to 1, got 2"),
        ({"estimator": "none"}, "estimator: allowed are unbiased, error_feedback, control_variate, got 'none'"),
        ({"aggregation": "ring"}, "aggregation: allowed are gather, server, got 'ring'"),
        ({"masks": "some"}, "masks: allowed are independent, permutation, shared, got 'some'"),
        ({"numel": 0}, "numel: must be a positive whole number of elements, got 0"),
        ({"block": 0}, "block: must be a positive whole number of elements, or a sequence of such, got 0"),
    ],
)
def test_refusals_reach_every_rank(options: dict[str, Any], sentence: str) -> None:
    for on_rank_1, on_all, at_rank_0 in (({}, options, sentence), (options, {}, "rank 1 refused its configuration")):
        with pytest.raises(RankFailed) as error:
            run_ranks(_make, 2, "loopback", (on_rank_1, on_all), timeout=20)
        assert sentence in error.value.reports[1] and at_rank_0 in error.value.reports[0]


@pytest.mark.parametrize("field", ["tau", "seed", "numel", "masks", "aggregation", "estimator"])
def test_ranks_agree(field: str) -> None:
    other = {
        "tau": 0.25,
        "seed": 1,
        "numel": 51,
        "masks": "shared",
        "aggregation": "server",
        "estimator": "error_feedback",
    }[field]
    with pytest.raises(RankFailed) as error:
        run_ranks(_make, 2, "loopback", ({field: other}, {}), timeout=20)
    assert all(
        f"{field}: rank" in report and "every rank needs the same" in report for report in error.value.reports.values()
    )


def test_what_cannot_be_summed_is_refused() -> None:
    exchange, sampler = BlockExchange(connect()), BlockSampler.over(10, 0.5)
    for v in (torch.zeros(10, dtype=torch.bfloat16), torch.zeros(2, 5), torch.zeros(20)[::2]):
        with pytest.raises(ConfigError, match="v: has to be flat, contiguous, and float32 or float64"):
            exchange.sum(sampler, v, 0)
    with pytest.raises(ConfigError, match="along: has to be flat"):
        exchange.sum_and_gather(sampler, torch.zeros(10), 0, torch.zeros(1, dtype=torch.float64))
    mean = BlockMean(10)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"gradient: has to be flat with 10 elements, got \(9,\)"):
            mean.mean_(torch.zeros(9))
        mean.mean_(torch.zeros(10))
