"""Ranks that are configured differently: every rank raises, within seconds, and the message names the field."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decent_opt import ConfigError, Decentralized
from decent_opt.gossip.message import HEADER_BYTES
from decent_opt.testing import RankPool, run_ranks

NORMAL: dict[str, Any] = {"period": 4, "topology": "ring"}
OTHER = np.full((3, 3), 1 / 3)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "period": ({"period": 5}, "period"),
    "segments": ({"period": [(0, 4), (9, 2)]}, "period"),
    "topology": ({"topology": "star"}, "topology"),
    "matrix": ({"topology": 0.5 * np.eye(3) + 0.5 * OTHER}, "topology"),
    "warmup": ({"warmup_steps": 3}, "warmup_steps"),
    "global_every": ({"global_every": 2}, "global_every"),
    "outer": ({"outer_momentum": 0.5}, "outer_momentum"),
    "momentum": ({"momentum_sync": "average"}, "momentum_sync"),
    "bucket": ({"bucket_mb": 1.0}, "bucket_mb"),
    "invalid": ({"period": 0}, "period: allowed is an integer from 1 to .*, got 0"),
    "typo": ({"warm_up": 0}, "warm_up: no such option"),
    "bad timeout": ({"timeout": -1.0}, "timeout"),
    "shape": ({"shape": (4, 3)}, "weight: .*shape"),
    "dtype": ({"dtype": torch.float64}, "weight: .*dtype"),
    "frozen": ({"frozen": True}, "weight: .*requires_grad"),
    "extra": ({"extra": True}, "extra"),
    "base": ({"base": torch.optim.AdamW}, "base optimizer"),
}


class Odd(nn.Module):
    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, frozen: bool, extra: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=not frozen)
        if extra:
            self.extra = nn.Parameter(torch.zeros(2))


def construct(rank: int, odd: dict[str, Any]) -> tuple[str, str, float]:
    options = {**NORMAL, **(odd if rank == 1 else {})}
    shape, dtype = options.pop("shape", (3, 4)), options.pop("dtype", torch.float32)
    model = Odd(shape, dtype, options.pop("frozen", False), options.pop("extra", False))
    base = options.pop("base", torch.optim.SGD)(model.parameters(), lr=0.1)
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        Decentralized(base, model=model, **{"timeout": 30.0, **options})
    return type(error.value).__name__, str(error.value), time.monotonic() - began


@pytest.mark.parametrize("backend", ["gloo", "loopback"])
@pytest.mark.parametrize("case", list(CASES))
def test_a_difference_on_one_rank_raises_on_every_rank(ranks: RankPool, backend: str, case: str) -> None:
    odd, expected = CASES[case]
    run = ranks.run(construct, 3, (odd,)) if backend == "gloo" else run_ranks(construct, 3, backend, (odd,))
    for kind, text, seconds in run:
        assert seconds < 10
        assert kind in ("Disagreement", "ConfigError")
        assert __import__("re").search(expected, text), text


def freeze_later(rank: int, everyone: bool) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = Decentralized(torch.optim.SGD(model.parameters(), lr=0.1), model=model, period=1, timeout=3.0)
    sent = []
    try:
        for step in range(3):
            if step == 1 and (everyone or rank == 0):
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            sent.append(sum(optimizer.monitor.records[-1].bytes_sent.values()))
    except RuntimeError as error:
        return type(error).__name__ + ": " + str(error)
    return str(sent)


def test_freezing_on_all_ranks_takes_effect_from_the_next_round(ranks: RankPool) -> None:
    header, all_of_it, only_last = HEADER_BYTES, 16 * 4, 4 * 4
    assert ranks.run(freeze_later, 2, (True,)) == [str([all_of_it + header] + [only_last + header] * 2)] * 2


def test_freezing_on_one_rank_raises_on_all(ranks: RankPool) -> None:
    for text in ranks.run(freeze_later, 2, (False,), timeout=40):
        assert text.startswith("PeerLost: rank ")
