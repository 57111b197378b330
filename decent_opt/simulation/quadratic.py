"""Noisy quadratics that differ between workers: problems whose every answer is known.

    f_k(x) = 1/2 (x - b_k)^T A_k (x - b_k),     f = (1/n) sum_k f_k,     mu I <= A_k <= L I
    g_k(x) = A_k (x - b_k) + noise,             E||noise||^2 = sigma^2

The noise is a pure function of (seed, worker, step): twin, processes and threads see the same gradients in
whatever order they ask, and nobody's random state is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NoisyQuadratics:
    """One quadratic for each worker.

    Attributes:
        curvature: A_k, (n, d, d), symmetric positive definite.
        centre: b_k, (n, d), where worker k alone would go.
        sigma: the size of the gradient noise.
        seed: of the noise.
    """

    curvature: Tensor
    centre: Tensor
    sigma: float = 0.0
    seed: int = 0

    def gradient(self, worker: int, x: Tensor, step: int) -> Tensor:
        """g_k(x) in this step, in the dtype of x: an oracle for the twin, or p.grad for a real optimizer."""
        g = self.curvature[worker] @ (x.to(self.centre) - self.centre[worker])
        return (g + self.noise(worker, step)).type_as(x)

    def noise(self, worker: int, step: int) -> Tensor:
        d = self.centre.shape[1]
        normal = np.random.default_rng((self.seed, worker, step)).standard_normal(d)
        return torch.from_numpy(normal).to(self.centre) * (self.sigma / d**0.5)

    def mean_gradient(self, x: Tensor) -> Tensor:
        """The true gradient of f at one x."""
        total: Tensor = torch.einsum("kij,kj->i", self.curvature, x - self.centre)
        return total / len(self.centre)

    @cached_property
    def optimum(self) -> Tensor:
        """Where the true gradient of f vanishes."""
        pull = torch.einsum("kij,kj->i", self.curvature, self.centre)
        optimum: Tensor = torch.linalg.solve(self.curvature.sum(dim=0), pull)
        return optimum

    @cached_property
    def L(self) -> float:
        """Smoothness: the largest eigenvalue of any A_k."""
        return float(torch.linalg.eigvalsh(self.curvature).max())

    @cached_property
    def mu(self) -> float:
        """Strong convexity: the smallest eigenvalue of any A_k."""
        return float(torch.linalg.eigvalsh(self.curvature).min())


def noisy_quadratics(
    workers: int,
    dimension: int,
    *,
    L: float = 1.0,
    mu: float = 0.1,
    heterogeneity: float = 1.0,
    common_curvature: bool = False,
    sigma: float = 0.0,
    seed: int = 0,
) -> NoisyQuadratics:
    """Random quadratics, float64, with eigenvalues spread evenly over [mu, L].

    Args:
        workers: n.
        dimension: d, at least 2 for both L and mu to be reached.
        L: the largest curvature.
        mu: the smallest.
        heterogeneity: root mean square distance of the centres b_k from 0.
        common_curvature: the same eigenvectors for all workers, instead of random ones for each. Then the
            gradient of the average is the average of the gradients, and consensus errors cost nothing.
        sigma: the size of the gradient noise.
        seed: of the problem and of its noise.
    """
    rng = np.random.default_rng(seed)
    spectrum = np.linspace(mu, L, dimension)
    axes = np.linalg.qr(rng.standard_normal((1 if common_curvature else workers, dimension, dimension))).Q
    curvature = torch.from_numpy((axes * spectrum) @ axes.swapaxes(1, 2)).expand(workers, -1, -1)
    centre = torch.from_numpy(rng.standard_normal((workers, dimension))) * (heterogeneity / dimension**0.5)
    return NoisyQuadratics(curvature, centre, sigma, seed)
