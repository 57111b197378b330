"""From plain training and back; averages over time of the consensus model; the warning about identical data."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from decent_opt import Decentralized, LocalAdamW
from decent_opt.testing import run_ranks, seeded


def model_of() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Tensor:
    for step in steps:
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def there_and_back(rank: int, kind: str) -> tuple[bool, bool, Tensor]:
    """Plain AdamW on common data, then decentralised, then plain AdamW again."""
    model = model_of()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, plain, 0, range(4))
    moments = copy.deepcopy(plain.state_dict())
    if kind == "local":
        optimizer: Decentralized = LocalAdamW(model.parameters(), lr=0.01, warmup_steps=4, period=2, model=model)
    else:
        optimizer = Decentralized(torch.optim.AdamW(model.parameters(), lr=0.01), period=2, model=model)
    optimizer.load_state_dict(moments)
    kept = all(
        torch.equal(optimizer.state[p]["exp_avg"], moments["state"][i]["exp_avg"])
        for i, p in enumerate(model.parameters())
    )
    train(model, optimizer, rank, range(4, 12))
    optimizer.consensus_()
    exported = optimizer.plain_state_dict()
    same_keys = [set(g) for g in exported["param_groups"]] == [set(g) for g in moments["param_groups"]]
    same_keys &= all(set(e) == {"step", "exp_avg", "exp_avg_sq"} for e in exported["state"].values())
    back = torch.optim.AdamW(model.parameters(), lr=0.5)
    back.load_state_dict(exported)
    assert back.param_groups[0]["lr"] == 0.01
    before = train(model, back, 0, range(0))
    moved = float((train(model, back, 0, range(12, 13)) - before).abs().max())
    # AdamW moves by about lr; a second moment that was corrected twice or not at all would move otherwise.
    return kept, same_keys and 0.002 < moved < 0.03, before


@pytest.mark.parametrize("kind", ["local", "adamw"])
def test_from_plain_adamw_and_back(kind: str) -> None:
    results = run_ranks(there_and_back, 3, "loopback", (kind,))
    for kept, exported, parameters in results:
        assert kept
        assert exported
        assert torch.equal(parameters, results[0][2])


def averages_over_time(rank: int) -> tuple[Tensor, Tensor]:
    model = model_of()
    optimizer = Decentralized(torch.optim.SGD(model.parameters(), lr=0.05), period=3, model=model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(model)
    for step in range(9):
        train(model, optimizer, rank, range(step, step + 1))
        with optimizer.averaged():
            ema.update_parameters(model)
            swa.update_parameters(model)
    flat = [torch.cat([p.detach().reshape(-1) for p in m.module.parameters()]) for m in (ema, swa)]
    return flat[0], flat[1]


def test_ema_and_swa_of_the_consensus_model_are_equal_on_all_ranks() -> None:
    results = run_ranks(averages_over_time, 3, "loopback")
    for ema, swa in results[1:]:
        assert torch.equal(ema, results[0][0])
        assert torch.equal(swa, results[0][1])
    assert not torch.equal(results[0][0], results[0][1])


def buffers_of(rank: int, policy: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    model = model_of()
    optimizer = Decentralized(
        torch.optim.SGD(model.parameters(), lr=0.05), period=2, topology="complete", model=model, buffers=policy
    )
    train(model, optimizer, rank, range(2))
    after_round = model[1].running_mean.clone()
    train(model, optimizer, rank, range(2, 3))
    own = model[1].running_mean.clone()
    with optimizer.averaged():
        inside = model[1].running_mean.clone()
    assert torch.equal(model[1].running_mean, own)
    return after_round, own, inside, model[1].num_batches_tracked.clone()


@pytest.mark.parametrize("policy", ["average", "broadcast", "local"])
def test_buffer_policies(policy: str) -> None:
    results = run_ranks(buffers_of, 3, "loopback", (policy,))
    after, own, inside = (torch.stack([r[i] for r in results]) for i in range(3))
    equal_after = bool((after == after[0]).all())
    if policy == "average":
        assert equal_after
        assert torch.allclose(inside, own.mean(0).expand_as(inside), atol=1e-6)
    else:
        assert not equal_after
        assert torch.equal(inside, own[0].expand_as(inside) if policy == "broadcast" else own)


def same_data(rank: int, shared: bool, overlap: int) -> int:
    model = model_of()
    optimizer = Decentralized(torch.optim.SGD(model.parameters(), lr=0.05), period=2, overlap_steps=overlap)
    train(model, optimizer, 0 if shared else rank, range(8))
    return optimizer.decent_round


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_identical_data_are_noticed_once(caplog: pytest.LogCaptureFixture, shared: bool, overlap: int) -> None:
    with caplog.at_level(logging.WARNING, "decent_opt"):
        run_ranks(same_data, 3, "loopback", (shared, overlap))
    warnings = [r for r in caplog.records if "same data" in r.getMessage()]
    assert len(warnings) == (3 if shared else 0)
