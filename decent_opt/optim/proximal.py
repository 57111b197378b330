"""Proximal steps after any torch optimizer's: penalties and constraints whose gradient does not exist or does not help.

    proximal(optimizer, L1(1e-3))         # from now on, after every step:  x <- prox_{lr R}(x)

    prox_{lr R}(y) = argmin_x R(x) + ||x - y||^2 / (2 lr)           lr: that of the parameter's group

After plain SGD this is the proximal gradient method for f + R, and so is every method whose step is x <- x - lr g with
g for grad f: `BlockMean` with control variates and SGD are ISEGA with a prox ("99% of Distributed Optimization is a
Waste of Time", arXiv 1901.09437). l1 gives exact zeros, a box holds exactly, at any step size.

What it means after others:
* momentum mu of torch's SGD (no dampening): a constant gradient moves x by lr g / (1 - mu) a step, so R counts
  1 - mu times; give L1 and L2 a weight 1 / (1 - mu) times as large. The path is not that of accelerated methods.
* Adam and the like: a step of lr m / sqrt(v), while the prox stays in the plain metric. R is weighed against the
  normalised gradient, not against f; `L2` is then decoupled weight decay, lr weight x as in AdamW. A box still holds.
* `Decentralized`: once after each step, behind the round of gossip where there is one.
* `IASGD`: its theory has no R.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from decent_opt.errors import ConfigError


class Regularizer(Protocol):
    """R, a convex function that may be infinite, as its prox."""

    def prox_(self, tensors: list[Tensor], lr: float) -> None:
        """Overwrite each y with prox_{lr R}(y)."""
        ...


@dataclass(frozen=True)
class L1:
    """R(x) = weight ||x||_1;  prox: |y| shrinks by lr weight, down to 0.

    Raises:
        ConfigError: weight is not a number from 0 on.
    """

    weight: float

    def __post_init__(self) -> None:
        _check_weight("L1", self.weight)

    def prox_(self, tensors: list[Tensor], lr: float) -> None:
        """Soft thresholding."""
        threshold = lr * self.weight
        for tensor in tensors:
            tensor.sub_(tensor.clamp(-threshold, threshold))


@dataclass(frozen=True)
class L2:
    """R(x) = weight/2 ||x||^2;  prox: y / (1 + lr weight).

    Raises:
        ConfigError: weight is not a number from 0 on.
    """

    weight: float

    def __post_init__(self) -> None:
        _check_weight("L2", self.weight)

    def prox_(self, tensors: list[Tensor], lr: float) -> None:
        """Shrink."""
        torch._foreach_div_(tensors, 1 + lr * self.weight)


@dataclass(frozen=True)
class Box:
    """R(x) = 0 if low <= x <= high in every coordinate, else infinite;  prox: clamp, whatever lr is.

    Raises:
        ConfigError: low is not below or equal to high.
    """

    low: float = 0.0
    high: float = float("inf")

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"Box: low has to be at most high, got {self.low!r} and {self.high!r}")

    def prox_(self, tensors: list[Tensor], lr: float) -> None:
        """Clamp."""
        for tensor in tensors:
            tensor.clamp_(self.low, self.high)


def proximal(
    optimizer: torch.optim.Optimizer, regularizer: Regularizer, params: Iterable[Tensor] | None = None
) -> RemovableHandle:
    """Let every step of an optimizer end with x <- prox_{lr R}(x).

    Copies and unpickled optimizers come without the hook, as with all hooks of torch: register it again. Of several
    registered ones the first comes first; L1 before L2, and either before a box, is the prox of their sum.

    Args:
        optimizer: any; see the module for what it means.
        regularizer: R: `L1`, `L2`, `Box` or one of your own.
        params: the parameters R is of; None: all of the optimizer. Those without a gradient are left alone, as the
            optimizer leaves them.

    Returns:
        What removes it again: `handle.remove()`.

    Raises:
        ConfigError: a parameter that the optimizer does not have.
    """
    only = None if params is None else {id(parameter) for parameter in params}
    if only is not None and not only <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
        raise ConfigError("params: a tensor among them is no parameter of the optimizer")

    @torch.no_grad()
    def after_step(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in stepped.param_groups:
            mine = [p for p in group["params"] if p.grad is not None and (only is None or id(p) in only)]
            if mine:
                regularizer.prox_(mine, float(group["lr"]))

    return optimizer.register_step_post_hook(after_step)


def _check_weight(name: str, weight: float) -> None:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise ConfigError(f"{name}: the weight must be a finite number from 0 on, got {weight!r}")
