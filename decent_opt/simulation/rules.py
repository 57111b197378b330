"""Local rules on the array X of all workers, (n, d): SGD with momentum and AdamW, as torch defines them.

Learning rate and weight decay may be vectors (d,), which is how two parameter groups look here, and may be
set anew between steps, as a scheduler does. `state` holds the moments, shaped like X.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    """What every worker does with its gradient. Rows never mix here."""

    state: dict[str, Tensor]

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        """X after one local step of every worker with its row of G."""
        ...

    def learn(self, G: Tensor, mean: Tensor) -> None:
        """Called before a step with averaged gradients: the workers' own G, and the mean that they all step with."""

    def end_warmup(self) -> None:
        """Called once, after the last step of the warm-up."""


@dataclass
class SGDM:
    """g <- g + weight_decay x;  m <- momentum m + (1 - dampening) g, at first m = g;  x <- x - lr m.

    Nesterov steps along g + momentum m instead of m.
    """

    lr: float | Tensor
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float | Tensor = 0.0
    state: dict[str, Tensor] = field(default_factory=dict)

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        G = G + self.weight_decay * X
        if self.momentum == 0:
            return X - self.lr * G
        M = self.momentum * self.state["m"] + (1 - self.dampening) * G if self.state else G
        self.state["m"] = M
        return X - self.lr * (G + self.momentum * M if self.nesterov else M)

    def learn(self, G: Tensor, mean: Tensor) -> None:
        pass

    def end_warmup(self) -> None:
        pass


@dataclass
class AdamW:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  x <- (1 - lr decay) x - lr m^ / (sqrt(v^) + eps).

    m^ = m / (1 - b1^t) and v^ = v / (1 - b2^t).
    """

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | Tensor = 1e-2
    state: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        b1, b2 = self.betas
        if not self.state:
            self.state = {"m": torch.zeros_like(X), "v": torch.zeros_like(X)}
        self.steps += 1
        self.state["m"] = b1 * self.state["m"] + (1 - b1) * G
        self.state["v"] = b2 * self.state["v"] + (1 - b2) * G**2
        return self.move(X, self.corrected_v())

    def move(self, X: Tensor, v: Tensor) -> Tensor:
        m = self.state["m"] / (1 - self.betas[0] ** self.steps)
        return (1 - self.lr * self.weight_decay) * X - self.lr * m / (v.sqrt() + self.eps)

    def corrected_v(self) -> Tensor:
        return self.state["v"] / (1 - self.betas[1] ** self.steps)

    def learn(self, G: Tensor, mean: Tensor) -> None:
        pass

    def end_warmup(self) -> None:
        pass
