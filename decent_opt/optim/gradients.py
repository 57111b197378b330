"""Exact averages of gradients: every step of the warm-up, and where a base optimizer asks for one."""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.config import DecentConfig
from decent_opt.errors import ConfigError
from decent_opt.gossip import average_

logger = logging.getLogger(__name__)


@runtime_checkable
class LearnsFromAverages(Protocol):
    """A base optimizer that learns from averaged gradients what it uses later, as `SharedMomentAdamW` does."""

    def claims(self, config: DecentConfig) -> dict[str, str]:
        """What all ranks must have alike (name -> value as text); raises `ConfigError` on what is not allowed."""
        ...

    def observe_own_gradients(self) -> None:
        """This worker's own gradients, just before they are averaged."""

    def observe_mean_gradients(self) -> None:
        """The mean of the workers' gradients, just after."""

    def wants_average(self, round: int) -> bool:
        """Should the step that follows this many rounds average gradients, too?"""

    def end_warmup(self, workers: int) -> None:
        """The warm-up's last step is done; `workers` took part."""


def average_gradients_(
    transport: Transport,
    parameters: dict[str, Tensor],
    bucket_bytes: int,
    found_inf: Tensor | None = None,
    learner: LearnsFromAverages | None = None,
) -> tuple[Tensor, int]:
    """g <- mean of the workers' gradients; collective.

    A parameter without a gradient counts as zero where another worker has one, and keeps None where none has. The mean
    is over the workers whose gradients are finite.

    Args:
        parameters: name -> parameter, the same on all ranks.
        found_inf: not 0 if this worker's gradients have overflowed; None without a GradScaler.
        learner: is shown the gradients before and after, unless they have overflowed.

    Returns:
        1 if any worker's gradients have overflowed, else 0 (0-d, float32), and the bytes sent.
    """
    if not parameters:
        return torch.zeros(()), 0
    for name, p in parameters.items():
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ConfigError(f"warmup_steps: {name} has a {p.grad.layout} gradient; averaging needs dense ones")
    if learner is not None and not (found_inf is not None and bool(found_inf)):
        learner.observe_own_gradients()
    for p in parameters.values():
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)  # ranks average in memory order
    missing = [p for p in parameters.values() if p.grad is None]
    device = next(iter(parameters.values())).device
    flags = torch.tensor([float(p.grad is not None) for p in parameters.values()] + [0.0]).to(device)
    if found_inf is not None:
        flags[-1] = found_inf
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters.values() if p.grad is not None]

    def report(bad: list[int]) -> None:
        if bad and found_inf is None:
            logger.warning(
                "rank %d: gradients of %d parameters are not finite, the first is %s; they are left out of the mean",
                *(transport.rank, len(bad), list(parameters)[bad[0]]),
            )

    # On an accelerator the host would have to wait for the answer, in every step.
    told = report if device.type == "cpu" else None
    sent = average_(transport, gradients, bucket_bytes, report=told).sent + transport.average_([flags])
    if missing:
        someone_has = dict(zip(map(id, parameters.values()), flags.tolist(), strict=False))
        for parameter in missing:
            if not someone_has[id(parameter)]:
                parameter.grad = None
    overflow = flags[-1] > 0
    if learner is not None and not (found_inf is not None and bool(overflow)):
        learner.observe_mean_gradients()
    return overflow.float(), sent  # fused optimizers skip on exactly 1
