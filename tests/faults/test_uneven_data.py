"""Workers with fewer batches than others, or none, finish cleanly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import Decentralized, LocalAdamW
from decent_opt.testing import RankPool, run_ranks, seeded

BATCHES = [5, 11, 0, 8]
PLAIN = partial(torch.optim.SGD, lr=0.05)  # where a gradient of zero changes nothing
CPD: dict[str, Any] = {"algorithm": "cpd", "gamma": 0.4}
VARIANTS: dict[str, dict[str, Any]] = {
    "pd": {},
    "period 1": {"period": 1},
    "overlap": {"overlap_steps": 2, "outer_momentum": 0.3},
    "exact averages": {"global_every": 2},
    "warm-up": {"warmup_steps": 7},
    "all warm-up": {"warmup_steps": 100},
    "cpd": CPD,
    "cpd fresh": {**CPD, "order": "fresh"},
}


def model_of() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def backward(model: nn.Module, rank: int, step: int) -> None:
    model(torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean().backward()


def joined(rank: int, options: dict[str, Any], base: Any) -> tuple[list[Tensor], int, int]:
    model = model_of()
    optimizer: Any
    if base == "local":
        optimizer = LocalAdamW(model.parameters(), lr=0.01, model=model, **{"period": 3, **options})
    else:
        optimizer = Decentralized(base(model.parameters()), model=model, **{"period": 3, **options})
    for _ in range(2):  # a second epoch begins in step
        with optimizer.join():
            for step in range(BATCHES[rank]):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
    optimizer.consensus_()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], optimizer.decent_step, optimizer.decent_round


def with_zero_gradients(rank: int, options: dict[str, Any], steps: int) -> list[Tensor]:
    """The same, written out: who has no batch has gradients of zero. Two epochs of so many steps each."""
    model = model_of()
    optimizer = Decentralized(PLAIN(model.parameters()), model=model, **{"period": 3, **options})
    for _ in range(2):
        for step in range(steps):
            optimizer.zero_grad()
            if step < BATCHES[rank]:
                backward(model, rank, step)
            optimizer.step()
    optimizer.consensus_()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_everybody_finishes_at_the_same_step(variant: str) -> None:
    options = VARIANTS[variant]
    results = run_ranks(joined, 4, "loopback", (options, PLAIN), timeout=30)
    assert len({(step, round) for _, step, round in results}) == 1
    for parameters, _, _ in results:
        assert all(torch.equal(p, q) for p, q in zip(parameters, results[0][0], strict=True))
    if variant in ("period 1", "all warm-up"):  # no step is passed in which nothing is exchanged
        steps = max(BATCHES) + 1  # in the last one all find that nobody goes on
        assert results[0][1] == 2 * steps
        expected = run_ranks(with_zero_gradients, 4, "loopback", (options, max(BATCHES)), timeout=30)
        assert all(torch.equal(p, q) for p, q in zip(results[0][0], expected[0], strict=True))


@pytest.mark.parametrize("base", ["local", partial(torch.optim.AdamW, lr=0.01)])
def test_with_adam(base: Any) -> None:
    results = run_ranks(joined, 4, "loopback", ({"warmup_steps": 4}, base), timeout=30)
    assert len({(step, round) for _, step, round in results}) == 1
    assert all(bool(p.isfinite().all()) for parameters, _, _ in results for p in parameters)


def test_between_processes_as_between_threads(ranks: RankPool) -> None:
    virtual = run_ranks(joined, 4, "loopback", ({}, PLAIN), timeout=30)
    for (ours, *counts), (theirs, *others) in zip(ranks.run(joined, 4, ({}, PLAIN)), virtual, strict=True):
        assert counts == others and all(torch.allclose(p, q, atol=1e-7) for p, q in zip(ours, theirs, strict=True))


def alone(rank: int) -> int:
    model = model_of()
    optimizer = Decentralized(PLAIN(model.parameters()), period=3)
    with optimizer.join():
        for step in range(4):
            backward(model, rank, step)
            optimizer.step()
    return optimizer.decent_step


def test_one_worker_has_nobody_to_wait_for() -> None:
    assert run_ranks(alone, 1, "loopback") == [4]
