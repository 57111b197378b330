"""Matrix twins of the block methods that learn what the workers' gradients are at the optimum: ISEGA, DIANA, ISAGA.

IBCD stalls where grad f_i(x*) is not zero. ISEGA and DIANA keep h_i -> grad f_i(x*), one vector a worker, and send
differences to it; ISAGA keeps a table of the samples' gradients. Conventions are those of `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from decent_opt.simulation.blocks import BlockTwin, Gradients, Mask, draw_samples
from decent_opt.simulation.finite_sums import FiniteSum

Prox = Callable[[Tensor, float], Tensor]
"""prox(y, lr) = argmin_x R(x) + ||x - y||^2 / (2 lr)."""


def no_prox(y: Tensor, lr: float) -> Tensor:
    """R = 0."""
    return y


def l1_prox(weight: float) -> Prox:
    """R = weight ||x||_1: soft thresholding."""
    return lambda y, lr: y.sign() * (y.abs() - lr * weight).clamp(min=0)


class ISEGA(BlockTwin):
    """Send D_i = (grad f_i(x) - h_i)_{U_i};  g = hbar + 1/(tau n) sum_i D_i;  x <- prox(x - lr g);  h_i <- h_i + D_i.

    g uses hbar = (1/n) sum_i h_i from before the step, and 1/tau multiplies D_i only in g. The h_i start at 0.

    Args:
        x0: the start (d,).
        gradients: the oracle.
        workers: n.
        mask: which blocks are sent.
        tau: k / m, exactly.
        lr: the step size, see `theory.isega_step`.
        prox: of R, which is added to f.
    """

    def __init__(
        self,
        x0: Tensor,
        gradients: Gradients,
        workers: int,
        mask: Mask,
        *,
        tau: float,
        lr: float,
        prox: Prox = no_prox,
    ) -> None:
        super().__init__(x0, workers, mask)
        self.gradients = gradients
        self.tau, self.lr, self.prox = tau, lr, prox
        self.H = x0.new_zeros(workers, len(x0))

    def update(self, U: Tensor) -> None:
        D = U * (self.gradients(self.x, self.steps + 1) - self.H)
        g = self.H.mean(dim=0) + D.mean(dim=0) / self.tau
        self.x = self.prox(self.x - self.lr * g, self.lr)
        self.H = self.H + D


class DIANA(BlockTwin):
    """Send q_i = Q(grad f_i(x) - h_i);  g = hbar + (1/n) sum_i q_i;  x <- x - lr g;  h_i <- h_i + alpha q_i.

    Q is Rand-k, Q(v) = (v)_U / tau: unbiased, with E||Q(v) - v||^2 = omega ||v||^2, omega = 1/tau - 1. With
    alpha = 1 / (1 + omega) = tau this is ISEGA (Mishchenko et al., arXiv 1901.09269).

    Args:
        x0: the start (d,).
        gradients: the oracle.
        workers: n.
        mask: which blocks are sent.
        tau: k / m, exactly.
        lr: the step size.
        alpha: the step size of the h_i, at most 1 / (1 + omega).
    """

    def __init__(
        self, x0: Tensor, gradients: Gradients, workers: int, mask: Mask, *, tau: float, lr: float, alpha: float
    ) -> None:
        super().__init__(x0, workers, mask)
        self.gradients = gradients
        self.tau, self.lr, self.alpha = tau, lr, alpha
        self.H = x0.new_zeros(workers, len(x0))

    def update(self, U: Tensor) -> None:
        Q = U * (self.gradients(self.x, self.steps + 1) - self.H) / self.tau
        self.x = self.x - self.lr * (self.H + Q).mean(dim=0)
        self.H = self.H + self.alpha * Q


class ISAGA(BlockTwin):
    """v_i = grad f_ij(x) - a_ij + abar_i;  x <- x - lr/n sum_i (v_i)_{U_i};  a_ij <- grad f_ij(x).

    Each worker has data of its own, draws j among its l samples, and keeps their last gradients a_ij, with mean abar_i.
    Converges to x* only if grad f_i(x*) = 0 for all i; the samples' own gradients need not vanish.

    Args:
        x0: the start (d,).
        problem: the data.
        mask: which blocks are sent.
        lr: the step size, see `theory.isaga_step`.
        refresh: a_ij is renewed as a whole ("full": the table is local, so this costs no traffic), or only where v_i
            is sent ("masked").
        seed: of the samples.
    """

    def __init__(
        self,
        x0: Tensor,
        problem: FiniteSum,
        mask: Mask,
        *,
        lr: float,
        refresh: Literal["full", "masked"] = "full",
        seed: int = 0,
    ) -> None:
        super().__init__(x0, problem.workers, mask)
        self.problem, self.lr, self.refresh, self.seed = problem, lr, refresh, seed
        self.table = x0.new_zeros(problem.features.shape)

    def update(self, U: Tensor) -> None:
        n, samples, _ = self.table.shape
        rows = self.table.flatten(0, 1)
        drawn = draw_samples(n, samples, self.seed, self.steps + 1)
        drawn = drawn + samples * drawn.new_tensor(range(n))
        G = self.problem.sample_gradients(self.x, drawn)
        V = G - rows[drawn] + self.table.mean(dim=1)
        self.x = self.x - self.lr * (U * V).mean(dim=0)
        rows[drawn] = G if self.refresh == "full" else G.where(U > 0, rows[drawn])


class SharedISAGA(BlockTwin):
    """v_i = grad f_j(x) - a_j + abar;  x <- x - lr/n sum_i (v_i)_{U_i};  (a_j)_{U_i} <- (grad f_j(x))_{U_i}.

    All workers see all N samples, worker i draws its j among them, and one table serves all: it learns of a_j only what
    is sent. Nothing is assumed about the gradients at x*.

    Args:
        x0: the start (d,).
        problem: the data; who holds them is of no account.
        mask: which blocks are sent.
        lr: the step size, see `theory.isaga_step`.
        seed: of the samples.
    """

    def __init__(self, x0: Tensor, problem: FiniteSum, mask: Mask, *, lr: float, seed: int = 0) -> None:
        super().__init__(x0, problem.workers, mask)
        self.problem, self.lr, self.seed = problem, lr, seed
        self.table = x0.new_zeros(problem.targets.numel(), len(x0))

    def update(self, U: Tensor) -> None:
        drawn = draw_samples(self.workers, len(self.table), self.seed, self.steps + 1)
        G = self.problem.sample_gradients(self.x, drawn)
        V = G - self.table[drawn] + self.table.mean(dim=0)
        self.x = self.x - self.lr * (U * V).mean(dim=0)
        # Number by number: two workers may have drawn the same sample and sent different blocks of it.
        worker, coordinate = U.nonzero(as_tuple=True)
        self.table[drawn[worker], coordinate] = G[worker, coordinate]
