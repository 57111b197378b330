"""Matrix twins of the m/n block methods without tables: IBCD, ISGD, IASGD and error feedback.

Row i of every (n, d) array is worker i; (v)_U is v on the blocks U and zero elsewhere. In step t all workers know x,
worker i draws blocks U_i and sends those of its vector, and the master makes the next x (arXiv 1901.09437). These are
written from the formulas: with the distributed code they share nothing but the draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from decent_opt.simulation.finite_sums import FiniteSum
from decent_opt.sparsification import BlockSampler, Masks
from decent_opt.theory import NesterovConstants

Gradients = Callable[[Tensor, int], Tensor]
"""gradients(x, step) -> (n, d): every worker's gradient, exact or not, at the same x (d,); steps counted from 1."""

Mask = Callable[[int, int], Tensor]
"""mask(worker, step) -> (d,), bool or float: 1 on the blocks that the worker sends; steps counted from 0."""

LearningRate = float | Callable[[int], float]
"""A number, or a function of the step, counted from 0."""


def mask_of(sampler: BlockSampler, dimension: int) -> Mask:
    """The draws of a sampler as masks, float64. tau is `sampler.kept / sampler.blocks.count`, exactly."""

    def mask(worker: int, step: int) -> Tensor:
        chosen = sampler.chosen(step, worker)
        row = torch.zeros(dimension, dtype=torch.float64)
        sampler.blocks.add_(row, chosen, torch.ones(sampler.blocks.room(chosen), dtype=torch.float64))
        return row

    return mask


def coordinate_mask(workers: int, dimension: int, kept: int, *, masks: Masks = "independent", seed: int = 0) -> Mask:
    """The law of a `BlockSampler` whose blocks are single coordinates, all workers drawn at once: 20 times faster.

    Args:
        workers: n.
        dimension: d = m.
        kept: k.
        masks: see `BlockSampler`.
        seed: the run's.
    """
    rows = workers if masks == "independent" else 1
    turns = kept * torch.arange(workers).unsqueeze(1) if masks == "permutation" else torch.zeros(workers, 1).long()
    places = (turns + torch.arange(kept)) % dimension

    @lru_cache(maxsize=1)
    def draw(step: int) -> list[Tensor]:
        noise = torch.from_numpy(np.random.default_rng((seed, step)).random((rows, dimension)))
        order = noise.argsort(dim=1).expand(workers, -1)
        zeros = torch.zeros(workers, dimension, dtype=torch.float64)
        return list(zeros.scatter_(1, order.gather(1, places), 1.0))

    return lambda worker, step: draw(step)[worker]


def everything(dimension: int) -> Mask:
    """The mask of tau = 1."""
    ones = torch.ones(dimension, dtype=torch.float64)
    return lambda worker, step: ones


def draw_samples(workers: int, count: int, seed: int, step: int) -> Tensor:
    """One of `count` samples for each worker, uniformly, (n,): a function of seed and step alone."""
    return torch.from_numpy(np.random.default_rng((seed, step)).integers(count, size=workers))


def one_sample(problem: FiniteSum, *, shared: bool = False, seed: int = 0) -> Gradients:
    """The oracle of stochastic gradients: one random sample a worker, of its own data or of everybody's (`shared`)."""
    n, own = problem.targets.shape
    first = torch.zeros(n, dtype=torch.int64) if shared else own * torch.arange(n)
    count = n * own if shared else own
    return lambda x, step: problem.sample_gradients(x, first + draw_samples(n, count, seed, step))


class BlockTwin(ABC):
    """n workers and a master, one `step()` at a time.

    Args:
        x0: the start (d,).
        workers: n.
        mask: which blocks are sent.

    Attributes:
        x: the master's, (d,).
        steps: taken so far.
        sent: numbers that a worker has sent, on average.
    """

    def __init__(self, x0: Tensor, workers: int, mask: Mask) -> None:
        self.x = x0.clone()
        self.workers = workers
        self.mask = mask
        self.steps = 0
        self.sent = 0.0

    def step(self) -> None:
        """One step of all workers and the master."""
        U = torch.stack([self.mask(i, self.steps) for i in range(self.workers)]).to(self.x)
        self.update(U)
        self.steps += 1
        self.sent += float(U.sum()) / self.workers

    @abstractmethod
    def update(self, U: Tensor) -> None:
        """What a step does to x, given the masks (n, d); `self.steps` is still the number before it."""


class IBCD(BlockTwin):
    """x <- x - lr/n sum_i (grad f_i(x))_{U_i}.   By n, not by how many sent a block.

    Args:
        x0: the start (d,).
        gradients: the oracle.
        workers: n.
        mask: which blocks are sent.
        lr: the step size, see `theory.ibcd_step`.
    """

    def __init__(self, x0: Tensor, gradients: Gradients, workers: int, mask: Mask, *, lr: LearningRate) -> None:
        super().__init__(x0, workers, mask)
        self.gradients = gradients
        self.lr = lr

    def update(self, U: Tensor) -> None:
        lr = self.lr(self.steps) if callable(self.lr) else self.lr
        self.x = self.x - lr * (U * self.gradients(self.x, self.steps + 1)).mean(dim=0)


class ISGD(IBCD):
    """IBCD with stochastic gradients, such as those of `one_sample`; for lr see `theory.isgd_step`."""


class ErrorFeedback(IBCD):
    """v_i = g_i + e_i;  send q_i = (v_i)_{U_i}, not scaled;  e_i <- v_i - q_i;  x <- x - lr/n sum_i q_i.

    What is not sent waits in e_i: nothing is lost, and a block that comes again after 1/tau steps brings all of them.
    """

    def __init__(self, x0: Tensor, gradients: Gradients, workers: int, mask: Mask, *, lr: LearningRate) -> None:
        super().__init__(x0, gradients, workers, mask, lr=lr)
        self.errors = x0.new_zeros(workers, len(x0))

    def update(self, U: Tensor) -> None:
        lr = self.lr(self.steps) if callable(self.lr) else self.lr
        V = self.gradients(self.x, self.steps + 1) + self.errors
        Q = U * V
        self.errors = V - Q
        self.x = self.x - lr * Q.mean(dim=0)


class IASGD(BlockTwin):
    """Nesterov's accelerated SGD with g = 1/(tau n) sum_i (v_i(z))_{U_i}, under strong growth.

        z = alpha v + (1 - alpha) x;   x <- z - eta g;   v <- beta v + (1 - beta) z - gamma eta g

    Args:
        x0: the start (d,).
        gradients: the oracle.
        workers: n.
        mask: which blocks are sent.
        tau: k / m, exactly.
        constants: see `theory.nesterov_constants`.
    """

    def __init__(
        self, x0: Tensor, gradients: Gradients, workers: int, mask: Mask, *, tau: float, constants: NesterovConstants
    ) -> None:
        super().__init__(x0, workers, mask)
        self.gradients = gradients
        self.tau = tau
        self.constants = constants
        self.v = self.x

    def update(self, U: Tensor) -> None:
        c = self.constants
        z = c.alpha * self.v + (1 - c.alpha) * self.x
        g = (U * self.gradients(z, self.steps + 1)).mean(dim=0) / self.tau
        self.x = z - c.eta * g
        self.v = c.beta * self.v + (1 - c.beta) * z - c.gamma * c.eta * g


def steps_until(twin: BlockTwin, optimum: Tensor, *, below: float, limit: int) -> int | None:
    """Run until ||x - x*||^2 <= below ||x_0 - x*||^2: how many steps that took, None if `limit` were not enough."""
    start = (twin.x - optimum).square().sum()
    while twin.steps < limit:
        twin.step()
        if (twin.x - optimum).square().sum() <= below * start:
            return twin.steps
    return None
