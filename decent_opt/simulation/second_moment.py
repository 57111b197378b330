"""The matrix form of LocalAdamW: the second moment is learned from averaged gradients and kept, or followed.

All squares are elementwise; sums run over the coordinates of one parameter tensor, for each worker (row) by itself.

    warm-up:   v as AdamW, from the mean G;   u <- b2 u + (1 - b2) G^2
               s <- b s + (1 - b) sum G^2;    a likewise, from the mean G
    its end:   V = v / (1 - b2^t);   c = (a / s) / sum V;   s <- s / (1 - b^t)
    then:      "trend":      v^ = max(c s V, f / n  u / (1 - b2^t))
               "frozen":     v^ = max(V, f / n  u / (1 - b2^t))
               "refreshed":  as frozen, and V <- r V + (1 - r) mean^2 before a synchronous step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decent_opt.simulation.rules import AdamW


@dataclass
class SharedMomentAdamW(AdamW):
    """AdamW with a second moment of the averaged gradient.

    Attributes:
        sizes: how many coordinates each parameter tensor has, in order.
        second_moment: "trend", "frozen" or "refreshed".
        level_memory: b.
        floor: f.
        refresh_memory: r.
    """

    sizes: Sequence[int] = ()
    second_moment: str = "trend"
    level_memory: float = 0.9
    floor: float = 0.2
    refresh_memory: float = 0.9
    V: Tensor | None = None
    c: Tensor = field(default_factory=lambda: torch.zeros(()))
    u: Tensor = field(default_factory=lambda: torch.zeros(()))
    s: Tensor = field(default_factory=lambda: torch.zeros(()))
    a: Tensor = field(default_factory=lambda: torch.zeros(()))

    def learn(self, G: Tensor, mean: Tensor) -> None:
        if self.V is None:
            self.follow(G)
            self.a = self.level_memory * self.a + (1 - self.level_memory) * self.sums(mean**2)
        else:
            self.V = self.refresh_memory * self.V + (1 - self.refresh_memory) * mean**2

    def end_warmup(self) -> None:
        self.V = self.corrected_v()
        self.c = self.a / self.s / self.sums(self.V)
        self.s = self.s / (1 - self.level_memory**self.steps)

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        if self.V is None:
            return super().step(X, G)
        b1, b2 = self.betas
        self.steps += 1
        self.state["m"] = b1 * self.state["m"] + (1 - b1) * G
        self.follow(G)
        level = self.spread(self.c * self.s) if self.second_moment == "trend" else 1.0
        return self.move(X, torch.maximum(level * self.V, self.floor / len(X) * self.u / (1 - b2**self.steps)))

    def follow(self, G: Tensor) -> None:
        self.u = self.betas[1] * self.u + (1 - self.betas[1]) * G**2
        self.s = self.level_memory * self.s + (1 - self.level_memory) * self.sums(G**2)

    def sums(self, A: Tensor) -> Tensor:
        """Over each tensor's coordinates: (n, d) -> (n, tensors)."""
        return torch.stack([part.sum(dim=1) for part in A.split(list(self.sizes), dim=1)], dim=1)

    def spread(self, levels: Tensor) -> Tensor:
        """The other way: (n, tensors) -> (n, d)."""
        return levels.repeat_interleave(torch.tensor(list(self.sizes)), dim=1)
