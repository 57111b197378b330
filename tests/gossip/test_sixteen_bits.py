"""16-bit parameters keep what rounding would cut off; 16-bit messages of wide parameters keep the average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decent_opt import PDSGDM
from decent_opt.testing import run_ranks

UNIT = 2.0**-7  # of bfloat16 in [1, 2)


def mix_one_unit(rank: int, dtype: torch.dtype, rounds: int) -> tuple[Tensor, Tensor]:
    """Workers that differ by one unit in the last place at random; the full values at the start and at the end."""
    unit = UNIT if dtype == torch.bfloat16 else 2.0**-10
    ones = torch.randint(0, 2, (4000,), generator=torch.Generator().manual_seed(rank))
    x = torch.nn.Parameter((1.25 + unit * ones).to(dtype))
    before = x.detach().double() / unit
    optimizer = PDSGDM([x], lr=0.0, momentum=0.0, period=1, sync_init=False)
    for _ in range(rounds):
        x.grad = torch.zeros_like(x)
        optimizer.step()
    after = x.detach().double() + optimizer.state[x]["decent_remainder"].double()
    assert x.dtype == dtype
    assert torch.equal((x.detach().double()), after.to(dtype).double())  # the parameter is its full value, rounded
    return before, after / unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_unit_apart(dtype: torch.dtype) -> None:
    results = run_ranks(mix_one_unit, 8, "loopback", (dtype, 200))
    before, after = (torch.stack(side) for side in zip(*results, strict=True))
    consensus = (after - after.mean(0)).square().mean().sqrt()
    drift = (after.mean(0) - before.mean(0)).square().mean().sqrt()
    assert consensus < 0.25
    assert drift < 0.1


def narrow_messages(rank: int, dtype: str | None) -> tuple[Tensor, Tensor, int]:
    x = torch.nn.Parameter(torch.randn(5000, generator=torch.Generator().manual_seed(rank)))
    before = x.detach().clone()
    optimizer = PDSGDM([x], lr=0.0, momentum=0.0, period=1, sync_init=False, message_dtype=dtype)
    for _ in range(40):
        x.grad = torch.zeros_like(x)
        optimizer.step()
    return before, x.detach().clone(), optimizer.monitor.bytes_sent


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_messages_halve_the_bytes_and_keep_the_average(dtype: Any) -> None:
    results = run_ranks(narrow_messages, 4, "loopback", (dtype,))
    full = run_ranks(narrow_messages, 4, "loopback", (None,))
    before, after = (torch.stack([r[side] for r in results]) for side in (0, 1))
    assert (after.mean(0) - before.mean(0)).abs().max() < 1e-5
    # rounding to 8 (11) bits leaves a disagreement of that relative size
    assert (after - after.mean(0)).abs().max() < (0.03 if dtype == "bfloat16" else 0.004)
    assert 0.5 <= results[0][2] / full[0][2] < 0.51
