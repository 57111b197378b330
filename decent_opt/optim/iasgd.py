"""IASGD: Nesterov's accelerated SGD for gradients that vanish at the optimum, such as sparsified means of them.

    w <- z - eta g(z);   v <- beta v + (1 - beta) z - gamma eta g(z);   z <- alpha v + (1 - alpha) w

    theta = sqrt(mu eta / rho):    alpha = theta / (1 + theta),   beta = 1 - theta,   gamma = 1 / sqrt(mu eta rho)

Accelerated SGD of Vaswani, Bach and Schmidt 2019, for a mu-strongly convex f and E||g||^2 <= rho ||grad f||^2 (strong
growth), run with the mean of m/n blocks for g as in "99% of Distributed Optimization is a Waste of Time" (arXiv
1901.09437). What that does to rho is `theory.sparsified_growth` where all workers see all data, else
`theory.sparsified_dissimilarity`.

It pays only where strong growth holds with a small rho: iterations go with rho sqrt(L / mu), against rho L / mu of
plain steps. Strong growth means that g vanishes wherever grad f does. With noise left at the optimum there is no rho, v
collects the noise, and plain SGD does better; where data differ between the workers, rho can be 10 to 100 even if all
their gradients vanish at the same point. Nothing of the theory says that it helps deep networks.

The optimizer communicates nothing. Its gradients are the mean already: by `block_sparse_hook`, `BlockMean` or plain
DDP. Then all workers stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decent_opt.errors import ConfigError
from decent_opt.theory import NesterovConstants, nesterov_constants


class IASGD(torch.optim.Optimizer):
    """Accelerated SGD under strong growth; the parameters are z, where gradients are taken.

        optimizer = IASGD.for_smoothness(model.parameters(), L=10.0, mu=0.1, growth=2.0)

    `state` keeps v of every parameter, in its shape and dtype, from its first gradient on; w needs no memory. lr, mu
    and growth are options of a group: a schedule of lr is followed, with constants that fit each lr.

    Args:
        params: as in `torch.optim.SGD`.
        lr: eta, at most 1 / (growth L), L the smoothness of f.
        mu: strong convexity of f.
        growth: rho, at least 1.

    Raises:
        ConfigError: an option that is not allowed.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, *, mu: float, growth: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "mu": mu, "growth": growth})

    @classmethod
    def for_smoothness(cls, params: ParamsT, *, L: float, mu: float, growth: float = 1.0) -> IASGD:
        """The optimizer with the largest lr that the theory allows, 1 / (growth L)."""
        if not isfinite(L) or mu > L:
            raise ConfigError(f"L: must be finite and at least mu = {mu!r}, got {L!r}")
        return cls(params, 1 / (growth * L), mu=mu, growth=growth)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.

        Raises:
            ConfigError: one of its options is not allowed. Nothing was added then.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure returns, which is called once, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            z = [parameter for parameter in group["params"] if parameter.grad is not None]
            g = [parameter.grad for parameter in z]
            if any(gradient.is_sparse for gradient in g):
                raise ConfigError("params: IASGD does not take sparse gradients; make the embedding with sparse=False")
            for parameter in z:
                if "v" not in self.state[parameter]:
                    self.state[parameter]["v"] = parameter.clone(memory_format=torch.preserve_format)
            if z and float(group["lr"]):  # without a step nothing moves, and gamma would be infinite
                _step(z, g, [self.state[parameter]["v"] for parameter in z], constants_of(group))
        return loss


def constants_of(group: dict[str, Any]) -> NesterovConstants:
    """The constants of a group of parameters with its lr, mu and growth."""
    return nesterov_constants(1 / (group["growth"] * float(group["lr"])), group["mu"], group["growth"])


def _step(z: list[Tensor], g: list[Tensor], v: list[Tensor], c: NesterovConstants) -> None:
    """v and z of the next step, in place."""
    torch._foreach_lerp_(v, z, 1 - c.beta)
    torch._foreach_add_(v, g, alpha=-c.gamma * c.eta)
    torch._foreach_add_(z, g, alpha=-c.eta)  # w
    torch._foreach_lerp_(z, v, c.alpha)


def _check(group: dict[str, Any]) -> None:
    for name, least, allowed in (("lr", 0.0, "from 0 on"), ("mu", 0.0, "above 0"), ("growth", 1.0, "from 1 on")):
        value = group[name]
        number = isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) and isfinite(value)
        if not number or value < least or (name == "mu" and value == 0):
            raise ConfigError(f"{name}: must be a finite number {allowed}, got {value!r}")
    if group["mu"] * group["lr"] > group["growth"]:
        raise ConfigError(
            f"lr: must be at most growth / mu = {group['growth'] / group['mu']:g}, got {group['lr']!r}; "
            "1 / (growth L) is never more than that"
        )
