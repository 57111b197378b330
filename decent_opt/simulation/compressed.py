"""The matrix twin of CPD-SGDM: all workers' rows X and public copies Xhat in one array each.

    order "paper":   X <- X + gamma (W - I) Xhat;    outer momentum;    Xhat <- Xhat + Q(X - Xhat)
    order "fresh":   Xhat <- Xhat + Q(X - Xhat);     X <- X + gamma (W - I) Xhat;    outer momentum

Q acts on each row. The copies start at x_0, and again at X where all rows are equal: at the end of the warm-up and
after an exact average (whose outer step comes after the restart, for only the average is known to all).

`CompressedTwin` has one matrix Xhat that everybody agrees on. In `ExplicitCopiesTwin` each worker keeps copies of its
own, one of each neighbour, and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from decent_opt.simulation.matrix import Gradient, PeriodicTwin
from decent_opt.simulation.rules import Rule
from decent_opt.topology import Topology

Operator = Callable[[int, Tensor, int], Tensor]
"""operator(worker, x, round) -> Q(x), both (d,); rounds are counted from 0."""


class CompressedTwin(PeriodicTwin):
    """`PeriodicTwin` with public copies.

    Args:
        operator: Q, damping included.
        gamma: the consensus step size; may be set anew between steps.
        order: "paper" or "fresh".
        others: as in `PeriodicTwin`.
    """

    def __init__(
        self,
        x0: Tensor,
        gradient: Gradient,
        rule: Rule,
        topology: Topology,
        operator: Operator,
        *,
        gamma: float,
        order: Literal["paper", "fresh"] = "paper",
        period: int | Sequence[tuple[int, int]] = 8,
        **others: Any,
    ) -> None:
        super().__init__(x0, gradient, rule, topology, period=period, **others)
        self.operator, self.gamma, self.order = operator, gamma, order
        self.error = 0.0
        """(1/n) sum_k ||x_k - xhat_k||^2 just before the last message was made."""
        self.restart(self.X)

    def step(self) -> None:
        """One local step of every worker, and the round that is due after it."""
        super().step()
        if self.steps == self.warmup_steps:
            self.restart(self.X)

    def mix(self, W: Tensor) -> None:
        """One round; an exact average mixes X itself with J."""
        if self.global_every is not None and self.rounds % self.global_every == 0:
            self.restart(W @ self.X)
            self.arrive(W @ self.X)
            return
        if self.order == "fresh":
            self.send(self.rounds - 1)
        self.arrive(self.X + self.gamma * self.pull(W))
        if self.order == "paper":
            self.send(self.rounds - 1)

    def send(self, round: int) -> None:
        """Q(X - Xhat), row by row, to all who hold a copy."""
        differences = self.X - self.copies
        self.error = float(differences.square().sum(dim=1).mean())
        self.receive(torch.stack([self.operator(k, x, round) for k, x in enumerate(differences)]))

    # -- the copies --------------------------------------------------------------------------------------------

    def restart(self, X: Tensor) -> None:
        """Xhat <- X."""
        self.copies = X

    def pull(self, W: Tensor) -> Tensor:
        """(W - I) Xhat."""
        return W @ self.copies - self.copies

    def receive(self, Q: Tensor) -> None:
        """Xhat <- Xhat + Q."""
        self.copies = self.copies + Q


class ExplicitCopiesTwin(CompressedTwin):
    """The same with `held[k, j]`: the copy that worker k keeps of worker j, for each j that it hears from."""

    def restart(self, X: Tensor) -> None:
        n = self.topology.size
        hears = [[k, *self.topology.peers(k, 0).receive] for k in range(n)]
        self.held = {(k, j): X[j].clone() for k in range(n) for j in hears[k]}
        self.copies = X

    def pull(self, W: Tensor) -> Tensor:
        pulls = torch.zeros_like(self.X)
        for (k, j), copy in self.held.items():
            pulls[k] += W[k, j] * (copy - self.held[k, k])
        return pulls

    def receive(self, Q: Tensor) -> None:
        for k, j in self.held:
            self.held[k, j] = self.held[k, j] + Q[j]
        self.copies = torch.stack([self.held[k, k] for k in range(self.topology.size)])
