"""After values that were not finite: the neighbours restore a worker's parameters, and its moments begin anew."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_opt.optim import outer
from decent_opt.optim.own_state import COPY, PULL, REMAINDER


def clean_state_(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Zeros where the base's state of a parameter is not finite; outer momentum begins at the parameter."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if outer.X_PREV in optimizer.state.get(parameter, {}):
        outer.restart(optimizer, [parameter])


def restore_from_copies_(optimizer: torch.optim.Optimizer, parameter: Tensor, self_weight: float) -> None:
    """x <- xhat + z / (1 - w_kk), the weighted mean of the neighbours' public copies."""
    entries = optimizer.state[parameter]
    value = entries[COPY].add(entries[PULL], alpha=1 / (1 - self_weight)) if self_weight < 1 else entries[COPY]
    parameter.detach().copy_(value)
    if REMAINDER in entries:
        entries[REMAINDER].copy_(value - parameter.detach())
