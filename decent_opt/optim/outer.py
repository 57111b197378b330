"""Outer momentum: slow momentum over gossip, without extra traffic.

After mixing, per parameter:   d = x_prev - x_mixed;   v <- beta v + d;   x <- x_mixed - beta v;   x_prev <- x

x_prev is the parameter after the last round, so d is what p local steps and the mixing have moved it. The idea is
SlowMo's (Wang et al. 2020) with the exact average replaced by one round of gossip. v = 0 and x_prev = x at the
start, and again at the end of the warm-up. v is kept in float32 at least: it adds up small differences.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from decent_opt.optim.replica import OWN_PREFIX

X_PREV = OWN_PREFIX + "x_prev"
VELOCITY = OWN_PREFIX + "outer_momentum"


def create(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Give each parameter without entries v = 0 and x_prev = x; return those parameters."""
    fresh = [p for p in parameters if X_PREV not in optimizer.state.get(p, {})]
    for parameter in fresh:
        x = parameter.detach()
        optimizer.state[parameter][X_PREV] = x.clone()
        optimizer.state[parameter][VELOCITY] = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return fresh


def restart(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """v <- 0, x_prev <- x."""
    for parameter in parameters:
        entries = optimizer.state[parameter]
        entries[X_PREV].copy_(parameter.detach())
        entries[VELOCITY].zero_()


def apply_(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], beta: float) -> None:
    """One outer step on parameters that have just been mixed."""
    for parameter in parameters:
        entries, x = optimizer.state[parameter], parameter.detach()
        v = entries[VELOCITY]
        v.mul_(beta).add_(entries[X_PREV]).sub_(x)
        x.sub_((beta * v).to(x.dtype))
        entries[X_PREV].copy_(x)
