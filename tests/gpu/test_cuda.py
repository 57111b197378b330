"""On a CUDA device: virtual ranks give what the CPU gives, and fused and capturable optimizers work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import Decentralized, LocalAdamW
from decent_opt.testing import run_ranks, seeded

pytestmark = pytest.mark.gpu


def train(rank: int, device: str, kind: str) -> Tensor:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
    options: dict[str, Any] = {"period": 2, "warmup_steps": 4, "outer_momentum": 0.5, "model": model}
    if kind == "local":
        optimizer: Decentralized = LocalAdamW(model.parameters(), lr=0.01, **options)
    else:
        flags = {kind: True} if device == "cuda" and kind != "plain" else {}
        optimizer = Decentralized(torch.optim.AdamW(model.parameters(), lr=0.01, **flags), **options)
    for step in range(12):
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert optimizer.monitor.records[-1].consensus_distance is not None
    assert optimizer.consensus_distance() > 0
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()


@pytest.mark.parametrize("kind", ["plain", "fused", "capturable", "local"])
def test_cuda_gives_what_the_cpu_gives(kind: str) -> None:
    on_cpu, on_cuda = (run_ranks(train, 3, "loopback", (device, kind)) for device in ("cpu", "cuda"))
    for a, b in zip(on_cpu, on_cuda, strict=True):
        # Adam divides by square roots of small numbers, which makes 1e-7 of float32 some 1e-5.
        assert torch.allclose(a, b, atol=1e-4)
