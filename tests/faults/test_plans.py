"""200 random plans of what goes wrong in training: no hang, nothing that is not finite spreads, rounds in step."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import Decentralized, LocalAdamW
from decent_opt.gossip import exact, exchange
from decent_opt.testing import RankFailed, run_ranks, seeded

PLANS, BATCHES_OF_PLANS = 200, 8
STEPS, LAST_FAULT = 20, 8  # two rounds at least follow the last fault
SGD, ADAMW = partial(torch.optim.SGD, lr=0.03, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)
CPD: dict[str, Any] = {"algorithm": "cpd", "gamma": 0.3}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"base": ADAMW},
    {"overlap_steps": 1},
    {"outer_momentum": 0.4, "base": ADAMW},
    {"global_every": 2},
    {"message_dtype": "bfloat16"},
    {"dtype": torch.bfloat16},
    {"base": "local", "warmup_steps": 3},
    {"warmup_steps": 6},
    {"topology": "one-peer-exponential"},
    CPD,
    {**CPD, "order": "fresh", "compressor": "topk:share=0.3", "base": ADAMW},
    {**CPD, "compressor": "int8", "outer_momentum": 0.2},
]
KINDS = ["overflow", "nan", "inf", "slow", "empty", "unused"]


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int


@dataclass(frozen=True)
class Plan:
    seed: int
    workers: int
    variant: int
    period: int
    scaler: bool
    faults: tuple[Fault, ...]


def plan_of(seed: int) -> Plan:
    draw = random.Random(seed)
    workers, scaler = draw.randint(2, 4), draw.random() < 0.4
    # With a scaler every gradient that is not finite is an overflow.
    kinds = [kind for kind in KINDS if kind not in (("nan", "inf") if scaler else ("overflow",))]
    sick = draw.randrange(workers)  # if all are not finite in one round, nothing is left
    drawn = [
        (draw.choice(kinds), draw.randrange(workers), draw.randint(1, LAST_FAULT)) for _ in range(draw.randint(1, 4))
    ]
    faults = tuple(Fault(kind, sick if kind in ("nan", "inf") else rank, step) for kind, rank, step in drawn)
    return Plan(seed, workers, draw.randrange(len(VARIANTS)), draw.randint(1, 3), scaler, faults)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x if skip else x + self.branch(x).tanh())


def carry_out(rank: int, plan: Plan) -> dict[str, Any]:
    options = {"period": plan.period, **VARIANTS[plan.variant]}
    with seeded(0):
        model = Net().to(options.pop("dtype", torch.float32))
    dtype, base = model.last.weight.dtype, options.pop("base", SGD)
    if base == "local":
        optimizer: Any = LocalAdamW(model.parameters(), lr=0.01, model=model, **options)
    else:
        optimizer = Decentralized(base(model.parameters()), model=model, **options)
    scaler = torch.amp.GradScaler("cpu", enabled=plan.scaler, init_scale=256.0)
    fired, finite = [], True
    for step in range(STEPS):
        now = [fault.kind for fault in plan.faults if (fault.rank, fault.step) == (rank, step)]
        rows = 0 if "empty" in now else 8
        data = torch.randn(rows, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
        optimizer.zero_grad()
        scaler.scale(model(data, skip="unused" in now).square().sum() / 16).backward()
        before, scale = model.last.weight.detach().clone(), scaler.get_scale()
        if "slow" in now:
            time.sleep(0.02)
        for kind in now:
            if kind in ("overflow", "nan", "inf"):
                model.last.weight.grad[0, 0] = float("nan" if kind == "nan" else "inf")
        scaler.step(optimizer)
        scaler.update()
        effects = {
            "overflow": scaler.get_scale() < scale,
            # either it has reached the parameters, or an exchange has taken it out, which says so or restores them
            "nan": not torch.equal(before, model.last.weight),
            "inf": not torch.equal(before, model.last.weight),
            "slow": True,
            "empty": model.last.weight.grad is None or rows == 0,
            "unused": True if step < options.get("warmup_steps", 0) else model.branch.weight.grad is None,
        }
        fired += [(kind, effects[kind]) for kind in now]
        finite = finite and all(bool(p.isfinite().all()) for p in model.parameters())
    optimizer.close()
    tensors = [v for e in optimizer.state.values() for v in e.values() if isinstance(v, Tensor)]
    at_end = all(bool(t.isfinite().all()) for t in [*model.parameters(), *tensors])
    return {"fired": fired, "finite": finite, "at_end": at_end, "rounds": optimizer.decent_round}


def check(plan: Plan) -> None:
    results = run_ranks(carry_out, plan.workers, "loopback", (plan,), timeout=30)
    assert len({result["rounds"] for result in results}) == 1
    assert results[0]["rounds"] > 0
    for rank, result in enumerate(results):
        own = {(fault.kind, fault.step) for fault in plan.faults if fault.rank == rank}
        assert len(result["fired"]) >= len(own) and all(effect for _, effect in result["fired"])
        assert result["at_end"]
        assert result["finite"] or {"nan", "inf"} & {kind for kind, _ in own}


@pytest.mark.parametrize("batch", range(BATCHES_OF_PLANS))
def test_plans(batch: int) -> None:
    for seed in range(batch, PLANS, BATCHES_OF_PLANS):
        check(plan_of(seed))


def test_without_the_guard_twenty_plans_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exchange, exact):
        monkeypatch.setattr(module, "not_finite", lambda tensors: torch.zeros(len(tensors), dtype=torch.bool))
    failed = 0
    for plan in map(plan_of, range(PLANS)):
        if failed < 20 and {"nan", "inf"} & {fault.kind for fault in plan.faults}:
            try:
                check(plan)
            except (AssertionError, RankFailed):
                failed += 1
    assert failed == 20
