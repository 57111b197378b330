"""The matrix twin of periodic decentralised training: all workers in one array, X <- W X.

Row k of X, (n, d), is worker k. After every p local steps (PD-SGDM, where the local rule is momentum SGD):

    X_{t+1/2} = rule(X_t, G_t)          G_t: each worker's gradient at its own row
    X_{t+1}   = W_r X_{t+1/2}           if a round is due, else X_{t+1/2}

and around it the options: a warm-up of averaged gradients, a change of p, an exact average every H rounds,
mixing of the moments, and slow momentum over the rounds. This is the oracle of the distributed code: written
from the formulas, it shares nothing with it but W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from decent_opt.simulation.rules import Rule
from decent_opt.topology import Topology

Gradient = Callable[[int, Tensor, int], Tensor]
"""gradient(worker, x, step) -> g, with x and g of shape (d,) and steps counted from 1."""


class PeriodicTwin:
    """n workers on a topology, one `step()` at a time.

    Args:
        x0: the common start (d,); or one row for each worker (n, d).
        gradient: the gradient oracle.
        rule: the local rule, SGDM or AdamW.
        topology: W of every round.
        period: p; or segments (from_step, p) of which the first begins at 0.
        warmup_steps: in these first steps everyone uses the mean of all gradients; rounds begin afterwards.
        global_every: every H-th round averages exactly, J instead of W.
        outer_momentum: beta of slow momentum: d = x_prev - x_mixed; v <- beta v + d; x = x_mixed - beta v.
        momentum_sync: "average" mixes the moments of the rule with the same W.
        overlap_steps: s; W X is computed at the round, and (W - I) X of then is added to the rows s steps later.
        refresh_every: the step after every R-th round uses the mean of all gradients, too.
    """

    def __init__(
        self,
        x0: Tensor,
        gradient: Gradient,
        rule: Rule,
        topology: Topology,
        *,
        period: int | Sequence[tuple[int, int]] = 8,
        warmup_steps: int = 0,
        global_every: int | None = None,
        outer_momentum: float = 0.0,
        momentum_sync: Literal["local", "average"] = "local",
        overlap_steps: int = 0,
        refresh_every: int | None = None,
    ) -> None:
        self.gradient = gradient
        self.rule = rule
        self.topology = topology
        self.segments = [(0, period)] if isinstance(period, int) else list(period)
        self.warmup_steps = warmup_steps
        self.global_every = global_every
        self.outer_momentum = outer_momentum
        self.momentum_sync = momentum_sync
        self.overlap_steps = overlap_steps
        self.refresh_every = refresh_every

        self.X = x0.expand(topology.size, -1).clone()
        self.X_prev = self.X
        self.V = torch.zeros_like(self.X)
        self.steps = 0
        self.rounds = 0
        self.refresh = False
        self.pending: Tensor | None = None
        self.due = 0

    def step(self) -> None:
        """One local step of every worker, and the round that is due after it."""
        self.steps += 1
        t = self.steps
        G = torch.stack([self.gradient(k, x, t) for k, x in enumerate(self.X)])
        if t <= self.warmup_steps or self.refresh:
            mean = G.mean(dim=0).expand_as(G)
            self.rule.learn(G, mean)
            G = mean
        self.refresh = False
        self.X = self.rule.step(self.X, G)
        if t == self.warmup_steps:
            self.rule.end_warmup()
            self.X_prev = self.X
        if self.pending is not None and t == self.due:
            self.arrive(self.X + self.pending)
        if self.round_is_due():
            self.mix(self.next_matrix())
            self.refresh = self.refresh_every is not None and self.rounds % self.refresh_every == 0

    def round_is_due(self) -> bool:
        """(t - start) is a multiple of p, in the last segment with start < t."""
        t = self.steps
        start, p = max(segment for segment in self.segments if segment[0] < t)
        return self.topology.size > 1 and t > self.warmup_steps and (t - start) % p == 0

    def next_matrix(self) -> Tensor:
        """W of the round that is due, or J if it is an exact one; counts the round."""
        n, r = self.topology.size, self.rounds
        self.rounds += 1
        if self.global_every is not None and self.rounds % self.global_every == 0:
            return self.X.new_full((n, n), 1 / n)
        return self.X.new_tensor(self.topology.matrix(r))

    def mix(self, W: Tensor) -> None:
        """X <- W X, now or `overlap_steps` later. An exact average never waits."""
        exact = self.global_every is not None and self.rounds % self.global_every == 0
        if self.overlap_steps and not exact:
            self.pending, self.due = W @ self.X - self.X, self.steps + self.overlap_steps
            return
        if self.momentum_sync == "average":
            self.rule.state = {name: W @ moment for name, moment in self.rule.state.items()}
        self.arrive(W @ self.X)

    def arrive(self, X: Tensor) -> None:
        """The mixed rows, then slow momentum."""
        self.pending = None
        self.V = self.outer_momentum * self.V + (self.X_prev - X)
        self.X = self.X_prev = X - self.outer_momentum * self.V

    @property
    def mean(self) -> Tensor:
        """The average of the workers, (d,)."""
        return self.X.mean(dim=0)

    @property
    def consensus_error(self) -> float:
        """(1/n) sum_k ||x_k - mean||^2."""
        return float((self.X - self.mean).square().sum(dim=1).mean())
