"""Values that are not finite never leave their worker, and its neighbours restore it."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import Decentralized, LocalAdamW, NotFinite
from decent_opt.communication import connect
from decent_opt.gossip import OverlappedGossip, PeriodicGossip, average_
from decent_opt.testing import RankFailed, RankPool, run_ranks, seeded
from decent_opt.topology import make_topology

N, SICK = 4, 1


def values(rank: int) -> list[Tensor]:
    """Two tensors of one bucket, and one of another."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator) for n in (5, 3, 8)]


def mixed(rank: int, overlap: bool, dtype: torch.dtype | None, bad: float, sick: list[int]) -> list[Tensor]:
    tensors = values(rank)
    if rank in sick:
        tensors[1][2] = bad
    kind = OverlappedGossip if overlap else PeriodicGossip
    transport = connect()
    gossip = kind(transport, make_topology("ring", N), 8 * 4, dtype)
    gossip.start(tensors, 0)
    mixing = gossip.finish()
    assert mixing.not_finite() == ([1] if rank in sick else [])
    return tensors


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sick", [[1], [1, 2]])
def test_a_round_without_the_sick(overlap: bool, dtype: torch.dtype | None, bad: float, sick: list[int]) -> None:
    results = run_ranks(mixed, N, "loopback", (overlap, dtype, bad, sick))
    w = make_topology("ring", N).matrix(0)
    for rank, result in enumerate(results):
        for i, (own, got) in enumerate(zip(values(rank), result, strict=True)):
            healthy = [j for j in range(N) if i == 2 or j not in sick]  # the third tensor's bucket is finite everywhere
            terms = {j: float(w[rank, j]) for j in healthy}
            if rank in healthy:
                terms[rank] += sum(float(w[rank, j]) for j in range(N) if j not in healthy)
            total = sum(terms.values())
            expected = sum(weight / total * (own if j == rank else values(j)[i]) for j, weight in terms.items())
            # rounding of the message dtype: half a unit in the last place of values up to 3
            assert torch.allclose(got, expected, atol={None: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype])


def everywhere(rank: int) -> Tensor:
    tensor = torch.full((3,), math.nan)
    transport = connect()
    gossip = PeriodicGossip(transport, make_topology("ring", N), 100)
    gossip.start([tensor], 0)
    gossip.finish()
    return tensor


def test_where_nobody_is_finite_nothing_is_made_up() -> None:
    assert all(bool(tensor.isnan().all()) for tensor in run_ranks(everywhere, N, "loopback"))


def large_halves(rank: int) -> Tensor:
    tensor = torch.tensor([1e6 * (rank + 1), 1.0])
    gossip = PeriodicGossip(connect(), make_topology("complete", N), 100, torch.float16)
    gossip.start([tensor], 0)
    gossip.finish()
    return tensor


def test_large_values_do_not_become_infinite_in_half_precision() -> None:
    results = run_ranks(large_halves, N, "loopback")
    assert torch.stack(results)[:, 0].sum() == 1e7 and bool(torch.stack(results).isfinite().all())


def exactly(rank: int) -> list[Tensor]:
    tensors = values(rank)
    if rank == SICK:
        tensors[0][0] = math.inf
    used = average_(connect(), tensors, 8 * 4).used
    assert used.tolist() == [0.75, 1.0]
    return tensors


def test_an_exact_average_is_over_those_that_are_finite() -> None:
    for result in run_ranks(exactly, N, "loopback"):
        for i, got in enumerate(result):
            workers = [j for j in range(N) if i == 2 or j != SICK]
            assert torch.allclose(got, sum(values(j)[i] for j in workers) / len(workers), atol=1e-6)


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CPD: dict[str, Any] = {"algorithm": "cpd", "gamma": 0.4}
VARIANTS: dict[str, dict[str, Any]] = {
    "pd": {},
    "adamw": {"base": partial(torch.optim.AdamW, lr=0.01)},
    "outer": {"outer_momentum": 0.5},
    "overlap": {"overlap_steps": 2, "outer_momentum": 0.3},
    "exact averages": {"global_every": 1},
    "momentum": {"momentum_sync": "average"},
    "half": {"message_dtype": "bfloat16"},
    "bfloat16": {"dtype": torch.bfloat16},
    "local adamw": {"base": "local", "warmup_steps": 4},
    "warm-up": {"warmup_steps": 20},
    "cpd": CPD,
    "cpd fresh": {**CPD, "order": "fresh", "compressor": "topk:share=0.3"},
    "cpd outer": {**CPD, "outer_momentum": 0.3},
    "cpd bfloat16": {**CPD, "dtype": torch.bfloat16},
}


def train(rank: int, options: dict[str, Any], bad: float, at: int) -> dict[str, Any]:
    """Train for 16 steps; the gradient of one parameter of one rank is not finite once."""
    options = {"period": 3, **options}
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(options.pop("dtype", torch.float32))
    base = options.pop("base", SGD)
    if base == "local":
        optimizer: Any = LocalAdamW(model.parameters(), lr=0.01, model=model, **options)
    else:
        optimizer = Decentralized(base(model.parameters()), model=model, **options)
    finite, loss = [], math.nan
    for step in range(16):
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        out = model(data.to(next(model.parameters()).dtype))
        loss = float(out.detach().square().mean())
        out.square().mean().backward()
        if rank == SICK and step == at:
            model[2].weight.grad[1, 3] = bad
        optimizer.step()
        finite.append(all(bool(p.isfinite().all()) for p in model.parameters()))
    optimizer.close()
    state = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
    named = [name for record in optimizer.monitor.records for name in record.not_finite]
    return {
        "finite": finite,
        "state": all(bool(v.isfinite().all()) for v in state),
        "named": named,
        "rounds": optimizer.decent_round,
        "loss": loss,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [4, 5])  # between two rounds, and in the step of a round
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_that_is_not_finite_stays_on_its_worker(variant: str, at: int, bad: float) -> None:
    results = run_ranks(train, N, "loopback", (VARIANTS[variant], bad, at))
    assert len({result["rounds"] for result in results}) == 1
    for rank, result in enumerate(results):
        assert result["state"] and math.isfinite(result["loss"])
        if rank != SICK or variant == "warm-up":  # in the warm-up the others' mean replaces a gradient at once
            assert all(result["finite"]) and result["named"] == []
        else:
            assert not all(result["finite"]) or at == 5
            assert all(result["finite"][9:])
            assert "2.weight" in result["named"]


def stopped(rank: int, options: dict[str, Any]) -> tuple[list[str], int, str]:
    try:
        train(rank, {**options, "on_nonfinite": "raise", "topology": "complete"}, math.nan, 4)
    except NotFinite as error:
        return error.names, error.round, str(error)
    return [], -1, ""


@pytest.mark.parametrize("variant", ["pd", "exact averages", "cpd", "overlap"])
def test_raise_stops_all_who_hear_of_it_and_names_rank_round_and_parameter(variant: str) -> None:
    results = run_ranks(stopped, N, "loopback", (VARIANTS[variant],), timeout=30)
    for rank, (names, round, text) in enumerate(results):
        assert round == 1 and text.startswith(f"rank {rank}, round 1: parameters are not finite: ")
        assert ("2.weight" in names) == (rank == SICK)
        if rank == SICK:
            assert f"rank {SICK} has {len(names)} tensors that are not finite, the first is {names[0]}" in text


def test_it_is_warned_about_in_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_ranks(train, N, "loopback", ({}, math.nan, 4))
    texts = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(texts) == 1 and texts[0].startswith("rank 1, round 1: ") and "their moments begin anew" in texts[0]


def test_it_holds_between_processes(ranks: RankPool) -> None:
    for variant in ("pd", "cpd"):
        virtual = run_ranks(train, N, "loopback", (VARIANTS[variant], math.nan, 4))
        assert ranks.run(train, N, (VARIANTS[variant], math.nan, 4)) == virtual


def hopeless(rank: int, options: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    optimizer = Decentralized(torch.optim.SGD(model.parameters(), lr=0.1), model=model, period=1, **options)
    for step in range(8):
        model(torch.full((2, 3), math.nan if step == 2 else 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"overlap_steps": 1}, {"global_every": 1}])
def test_where_nothing_finite_is_left_all_stop(options: dict[str, Any]) -> None:
    with pytest.raises(RankFailed) as error:
        run_ranks(hopeless, 3, "loopback", (options,), timeout=30)
    assert len(error.value.reports) == 3
    last = [text.strip().splitlines()[-1] for text in error.value.reports.values()]
    # The first to stop ends this world, and may be missed by the others before they come to the same end.
    assert any("nothing is left to go on from but a checkpoint" in text for text in last)
    assert all("NotFinite" in text or "PeerLost" in text for text in last)
