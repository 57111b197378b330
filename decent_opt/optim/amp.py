"""Gradient scaling: a GradScaler may find an overflow on one rank only, and the rounds must stay in step.

With `_step_supports_amp_scaling` torch's GradScaler calls `step` in every case, and sets `found_inf` and, if the
gradients are still scaled, `grad_scale` on the optimizer. So an optimizer that has it can skip its update and
still count the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Scaling:
    """What the GradScaler said about the current step.

    Attributes:
        grad_scale: gradients have to be divided by it; None if they are unscaled already.
        found_inf: not 0 if a gradient of this rank is not finite; None without a GradScaler.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Scaling:
        """Read what the GradScaler has set."""
        return cls(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))

    @property
    def overflowed(self) -> bool:
        """Must the update be skipped? Reading it waits for the accelerator, as GradScaler.step itself does."""
        return self.found_inf is not None and bool(self.found_inf)

    def unscale_(self, parameters: Iterable[Tensor]) -> None:
        """g <- g / scale, once."""
        if self.grad_scale is None:
            return
        inverse = self.grad_scale.double().reciprocal().float()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
        self.grad_scale = None


def scaled_step(optimizer: torch.optim.Optimizer, scaling: Scaling, parameters: Iterable[Tensor]) -> Any:
    """Step an optimizer on gradients that may be scaled and may have overflowed; the step may be skipped."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # Fused optimizers divide and skip inside their kernel, without stopping the host.
        optimizer.grad_scale, optimizer.found_inf = scaling.grad_scale, scaling.found_inf  # type: ignore[attr-defined]
        try:
            return optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    scaling.unscale_(parameters)
    return None if scaling.overflowed else optimizer.step()
