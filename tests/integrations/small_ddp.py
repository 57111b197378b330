"""A small model for DDP on real ranks, with gradients that differ between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from decent_opt.testing import seeded

BUCKET = 4096 / 2**20  # MB: three buckets for the model below


class Net(nn.Module):
    """The middle matrix is large enough to be compressed by rows; `skip` leaves it unused."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 2)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x if self.skip else x + self.middle(x).tanh())


def net(**options: Any) -> Net:
    with seeded(0):
        return Net(**options)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        (scale * ddp(batch(rank, step)).square().mean()).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
