"""LocalAdamW beyond the contract and the twin: one rank, resume in every phase, refusals, robustness."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import ConfigError, LocalAdamW
from decent_opt.testing import run_ranks, seeded

RULES = ("trend", "frozen", "refreshed", "local")


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


@pytest.mark.parametrize("rule", RULES)
def test_on_one_rank_it_is_adamw(rule: Any) -> None:
    ours, plain = model_of(), model_of()
    local = LocalAdamW(ours.parameters(), lr=0.01, warmup_steps=3, second_moment=rule)
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01)
    assert torch.equal(train(ours, local, 0, range(12)), train(plain, adamw, 0, range(12)))


def resume(rank: int, rule: Any, cut: int) -> bool:
    options: dict[str, Any] = {"warmup_steps": 6, "period": 3, "second_moment": rule, "refresh_every": 2}
    model = model_of()
    optimizer = LocalAdamW(model.parameters(), lr=0.01, **options)
    train(model, optimizer, rank, range(cut))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, rank, range(cut, 24))
    other = model_of()
    resumed = LocalAdamW(other.parameters(), lr=0.5, sync_init=False, **options)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    return torch.equal(train(other, resumed, rank, range(cut, 24)), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [2, 6, 7, 9, 12, 17])
def test_resume_is_exact_in_every_phase(rule: str, cut: int) -> None:
    assert run_ranks(resume, 3, "loopback", (rule, cut), timeout=60) == [True] * 3


def test_refusals() -> None:
    parameters = list(model_of().parameters())
    with pytest.raises(ConfigError, match="second_moment: allowed are trend, frozen, refreshed, local, got 'frosen'"):
        LocalAdamW(parameters, warmup_steps=5, second_moment="frosen")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="warmup_steps: got 0, but the second moment is learned in the warm-up"):
        LocalAdamW(parameters, warmup_steps=0)
    with pytest.raises(ConfigError, match=r"warmup_steps: .*got -3"):
        LocalAdamW(parameters, warmup_steps=-3)
    LocalAdamW(parameters, warmup_steps=0, second_moment="local")


def rare_row(rank: int, rule: Any) -> float:
    """An embedding whose last row no worker sees in the warm-up, and then all do: how far does its first step go?"""
    with seeded(0):
        embedding = nn.Embedding(4, 3)
    optimizer = LocalAdamW(
        embedding.parameters(), lr=0.01, weight_decay=0.0, warmup_steps=20, period=100, second_moment=rule
    )
    generator = torch.Generator().manual_seed(rank)
    for step in range(24):
        rows = torch.arange(4 if step >= 20 else 3)
        target = torch.randn(len(rows), 3, generator=generator)
        optimizer.zero_grad()
        (embedding(rows) - target).square().sum().backward()
        before = embedding.weight.detach().clone()
        optimizer.step()
    return float((embedding.weight.detach() - before)[3].abs().max())


def test_the_floor_bounds_the_step_of_what_the_warmup_has_not_seen() -> None:
    """A second moment of 0 alone would step by lr g / eps; it goes at most sqrt(n / f) times as far as AdamW."""
    n, lr, floor = 2, 0.01, 0.2
    # m^ / sqrt(u^) after k sightings in a row is at most about sqrt(1 / (1 - b2)) times (1 - b1^k), 24 steps in.
    for rule in ("trend", "frozen", "refreshed"):
        assert max(run_ranks(rare_row, n, "loopback", (rule,))) <= lr * (n / floor) ** 0.5 * 5


def late_comers(rank: int, rule: Any, when: str) -> list[float]:
    """The largest steps of a parameter that the warm-up has not seen, by how it comes in."""
    model, head = model_of(), nn.Parameter(torch.ones(3))
    late = nn.Parameter(torch.ones(3), requires_grad=when != "unfrozen")
    groups = [*model.parameters(), head] + ([] if when == "added" else [late])
    optimizer = LocalAdamW(groups, lr=0.01, weight_decay=0.0, warmup_steps=4, period=3, second_moment=rule)
    steps = []
    for step in range(12):
        if step == 6 and when == "unfrozen":
            late.requires_grad_(True)
        if step == 6 and when == "added":
            optimizer.add_param_group({"params": [late]})
        before = late.detach().clone()
        optimizer.zero_grad()
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = model(batch).square().mean() + (head * head).sum()
        (loss + (late * late).sum() if step >= 6 else loss).backward()
        optimizer.step()
        steps.append(float((late.detach() - before).abs().max()))
    return steps[6:]


@pytest.mark.parametrize("when", ["unfrozen", "added", "unused"])
@pytest.mark.parametrize("rule", RULES)
def test_what_the_warmup_has_not_seen_goes_on_as_under_adamw(rule: str, when: str) -> None:
    for steps in run_ranks(late_comers, 2, "loopback", (rule, when), timeout=60):
        assert 0 < steps[0] <= 0.0101  # AdamW's first step is lr
        assert max(steps) < 0.05
