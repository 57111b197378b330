"""A round behind the local steps: the wait is hidden, nothing is lost by saving, copying, evaluating or closing."""

from __future__ import annotations

import copy
import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import PDSGDM, ConfigError
from decent_opt.testing import RankPool, run_ranks, seeded
from tests.delayed import Delayed


def model_of() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Tensor:
    for step in steps:
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


OPTIONS: dict[str, Any] = {"lr": 0.05, "period": 4, "overlap_steps": 3, "outer_momentum": 0.5}


def save_and_go_on(rank: int, cut: int, how: str) -> bool:
    """Cut while a round is in flight, or not; what is loaded goes on like what was never saved."""
    reference, model = model_of(), model_of()
    undisturbed = PDSGDM(reference.parameters(), **OPTIONS)
    expected = train(reference, undisturbed, rank, range(20))
    undisturbed.close()  # takes what is still in flight
    optimizer = PDSGDM(model.parameters(), **OPTIONS)
    train(model, optimizer, rank, range(cut))
    if how == "copied":
        model, optimizer = copy.deepcopy((model, optimizer))
    elif how == "loaded":
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = model_of()
        optimizer = PDSGDM(model.parameters(), sync_init=False, **OPTIONS)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    elif how == "saved by rank 0 alone" and rank == 0:
        optimizer.state_dict()
    elif how == "evaluated":
        with optimizer.averaged():
            pass
    return torch.equal(train(model, optimizer, rank, range(cut, 20)), expected)


@pytest.mark.parametrize("how", ["copied", "loaded", "saved by rank 0 alone", "evaluated"])
@pytest.mark.parametrize("cut", [3, 4, 5, 7, 10])
def test_nothing_in_flight_is_lost(how: str, cut: int) -> None:
    assert run_ranks(save_and_go_on, 3, "loopback", (cut, how), timeout=60) == [True] * 3


def consensus_in_flight(rank: int) -> tuple[Tensor, Tensor]:
    model = model_of()
    optimizer = PDSGDM(model.parameters(), **{**OPTIONS, "outer_momentum": 0.0})
    before = train(model, optimizer, rank, range(5))
    optimizer.consensus_()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert optimizer.param_groups[0]["decent_due"] is None
    return before, after


def test_consensus_completes_the_round_in_flight() -> None:
    results = run_ranks(consensus_in_flight, 3, "loopback")
    mean = torch.stack([before for before, _ in results]).mean(0)
    for _, after in results:
        assert torch.equal(after, results[0][1])
        assert torch.allclose(after, mean, atol=1e-6)  # corrections of a doubly stochastic W sum to zero


def exposed(rank: int, overlap: int, share: float) -> tuple[float, float]:
    """Least seconds waited in a round, and the delay: a share of the compute of a period, 80 ms per step."""
    period, rounds, compute = 5, 5, 0.08
    model = model_of()
    optimizer = PDSGDM(model.parameters(), lr=0.01, period=period, overlap_steps=overlap, timeout=60)
    delay = share * period * compute
    delayed = Delayed(optimizer.rounds.transport, delay)
    optimizer.rounds.runner.gossip.transport = delayed
    for step in range(period * (rounds + 1)):
        time.sleep(compute)  # a step on an accelerator: the host is free and the clock runs
        train(model, optimizer, rank, range(step, step + 1))
    records = [r for r in optimizer.monitor.records if r.kind == "gossip"][:rounds]
    optimizer.close()
    # The smallest: what a busy machine adds only ever adds, and a wait that is not hidden is in every round.
    return min(sum(r.wait_seconds.values()) for r in records), delay


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_wait_is_hidden(ranks: RankPool, share: float) -> None:
    hidden = ranks.run(exposed, 2, (5, share))
    shown = ranks.run(exposed, 2, (0, share))
    for (waited, delay), (waited_without, _) in zip(hidden, shown, strict=True):
        # 5 %, and 1 ms that a busy machine may need to hand over a message that is there
        assert waited <= 0.05 * delay + 1e-3
        assert waited_without >= 0.9 * delay


def test_refusals() -> None:
    for options, text in (
        (
            {"period": 4, "overlap_steps": 5},
            "overlap_steps: allowed is an integer from 0 to the shortest period, which is 4, got 5",
        ),
        ({"overlap_steps": -1}, "overlap_steps: .*got -1"),
        ({"overlap_steps": 2, "momentum_sync": "average"}, 'momentum_sync: allowed is "local" with overlap_steps'),
        ({"message_dtype": "int8"}, "message_dtype: .*got 'int8'"),
    ):
        with pytest.raises(ConfigError, match=text):
            PDSGDM(model_of().parameters(), **options)
