"""Outer momentum: slow momentum over gossip, without extra traffic.

After mixing, per parameter:   d = x_prev - x_mixed;   v <- beta v + d;   x <- x_mixed - beta v;   x_prev <- x

x_prev is the parameter after the last round, so d is what p local steps and the mixing have moved it. The idea is
SlowMo's (Wang et al. 2020) with the exact average replaced by one round of gossip. v = 0 and x_prev = x at the
start, and again at the end of the warm-up. Both are kept in float32 at least: they add up small differences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decent_opt.optim.replica import OWN_PREFIX

X_PREV = OWN_PREFIX + "x_prev"
VELOCITY = OWN_PREFIX + "outer_momentum"


def create(entries: dict[str, Any], parameter: Tensor) -> None:
    """v = 0 and x_prev = x."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    entries[X_PREV] = parameter.detach().to(wide, copy=True)
    entries[VELOCITY] = torch.zeros_like(parameter, dtype=wide)


def restart(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """v <- 0, x_prev <- x."""
    for parameter in parameters:
        entries = optimizer.state[parameter]
        entries[X_PREV].copy_(parameter.detach())
        entries[VELOCITY].zero_()


def apply_(entries: dict[str, Any], parameter: Tensor, beta: float, remainder: Tensor | None) -> None:
    """One outer step on a parameter that has just been mixed; its value is x + remainder if it has one."""
    x, x_prev, v = parameter.detach(), entries[X_PREV], entries[VELOCITY]
    value = x.to(x_prev.dtype, copy=True)
    if remainder is not None:
        value.add_(remainder)
    v.mul_(beta).add_(x_prev).sub_(value)
    value.sub_(v, alpha=beta)
    x.copy_(value)
    x_prev.copy_(value)
    if remainder is not None:
        torch.sub(value, x, out=remainder)
