"""Finite sums over workers whose data differ: least squares and logistic regression, with exact answers in float64.

    f_i(x) = (1/l) sum_j phi(a_ij . x, b_ij) + ridge/2 ||x||^2,       f = (1/n) sum_i f_i,      i in [n], j in [l]

    least squares   phi(z, b) = (z - b)^2 / 2
    logistic        phi(z, b) = log(1 + exp(-b z)),   b = -1 or 1

A sample's gradient is one number times its row, phi'(a . x, b) a, plus ridge x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FiniteSum(ABC):
    """A linear model's loss, spread over workers.

    Attributes:
        features: a_ij, (n, l, d), float64.
        targets: b_ij, (n, l), float64.
        ridge: of the l2 penalty.
    """

    features: Tensor
    targets: Tensor
    ridge: float = 0.0

    bend: ClassVar[float] = 1.0
    """The largest phi''."""

    @abstractmethod
    def phi(self, z: Tensor, b: Tensor) -> Tensor:
        """Elementwise loss."""

    @abstractmethod
    def slope(self, z: Tensor, b: Tensor) -> Tensor:
        """phi', elementwise."""

    @abstractmethod
    def curvature(self, z: Tensor, b: Tensor) -> Tensor:
        """phi'', elementwise."""

    @property
    def workers(self) -> int:
        """n."""
        return len(self.features)

    def value(self, x: Tensor) -> float:
        """f(x)."""
        return float(self.phi(self.features @ x, self.targets).mean() + self.ridge / 2 * x.square().sum())

    def gradients(self, x: Tensor, step: int = 0) -> Tensor:
        """grad f_i(x) of all workers, (n, d). Takes a step, and ignores it, to be an oracle of the twins."""
        slopes = self.slope(self.features @ x, self.targets)
        sums: Tensor = (slopes.unsqueeze(1) @ self.features).squeeze(1)
        return sums / slopes.shape[1] + self.ridge * x

    def gradient(self, worker: int, x: Tensor, step: int = 0) -> Tensor:
        """grad f_worker(x), (d,), in the dtype of x."""
        rows, exact = self.features[worker], x.to(self.features)
        slopes = self.slope(rows @ exact, self.targets[worker])
        return (slopes @ rows / len(rows) + self.ridge * exact).type_as(x)

    def sample_gradients(self, x: Tensor, samples: Tensor) -> Tensor:
        """Gradients of single samples, (k, d); number i l + j is sample j of worker i."""
        rows = self.features.flatten(0, 1)[samples]
        slopes = self.slope(rows @ x, self.targets.flatten()[samples])
        return slopes.unsqueeze(1) * rows + self.ridge * x

    def hessian(self, x: Tensor) -> Tensor:
        """Of f, (d, d)."""
        rows, z = self.features.flatten(0, 1), (self.features @ x).flatten()
        weights = self.curvature(z, self.targets.flatten()) / len(rows)
        return (rows.T * weights) @ rows + self.ridge * torch.eye(len(x), dtype=x.dtype)

    @cached_property
    def optimum(self) -> Tensor:
        """x*, (d,), by Newton's method down to rounding."""
        x = torch.zeros(self.features.shape[2], dtype=self.features.dtype)
        for _ in range(100):
            move = torch.linalg.solve(self.hessian(x), self.gradients(x).mean(dim=0))
            # Halved until f falls. Near the optimum f cannot tell any more, and the full step is right.
            while self.value(x - move) > self.value(x) * (1 + 1e-12) + 1e-12:
                move = move / 2
            x = x - move
            if move.norm() <= 1e-15 * (1 + x.norm()):
                break
        return x

    @cached_property
    def L(self) -> float:
        """Smoothness of the least smooth f_i."""
        gram = self.features.mT @ self.features / self.features.shape[1]
        return self.bend * float(torch.linalg.eigvalsh(gram).max()) + self.ridge

    @cached_property
    def sample_L(self) -> float:
        """Smoothness of the least smooth sample."""
        return self.bend * float(self.features.square().sum(dim=2).max()) + self.ridge

    @cached_property
    def mean_L(self) -> float:
        """Smoothness of f itself, at most L."""
        rows = self.features.flatten(0, 1)
        return self.bend * float(torch.linalg.eigvalsh(rows.T @ rows / len(rows)).max()) + self.ridge

    @property
    @abstractmethod
    def mu(self) -> float:
        """Strong convexity of f."""


class LeastSquares(FiniteSum):
    """phi(z, b) = (z - b)^2 / 2."""

    def phi(self, z: Tensor, b: Tensor) -> Tensor:
        return (z - b).square() / 2

    def slope(self, z: Tensor, b: Tensor) -> Tensor:
        return z - b

    def curvature(self, z: Tensor, b: Tensor) -> Tensor:
        return torch.ones_like(z)

    @cached_property
    def mu(self) -> float:
        """The smallest eigenvalue of the Hessian of f."""
        return float(torch.linalg.eigvalsh(self.hessian(self.features.new_zeros(self.features.shape[2]))).min())

    @cached_property
    def dissimilarity(self) -> float:
        """B = max_x (1/n) sum_i ||grad f_i(x)||^2 / ||grad f(x)||^2 where all f_i share their minimum."""
        _, samples, d = self.features.shape
        each = self.features.mT @ self.features / samples + self.ridge * torch.eye(d, dtype=self.features.dtype)
        inverse = torch.linalg.inv(each.mean(dim=0))
        return float(torch.linalg.eigvalsh(inverse @ (each @ each).mean(dim=0) @ inverse).max())


class Logistic(FiniteSum):
    """phi(z, b) = log(1 + exp(-b z))."""

    bend: ClassVar[float] = 0.25

    def phi(self, z: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-b * z)

    def slope(self, z: Tensor, b: Tensor) -> Tensor:
        return -b * torch.sigmoid(-b * z)

    def curvature(self, z: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    @property
    def mu(self) -> float:
        """The ridge: no more holds everywhere."""
        return self.ridge


def least_squares(
    workers: int,
    samples: int,
    dimension: int,
    *,
    noise: float = 0.0,
    orthogonal: bool = False,
    heterogeneity: float = 0.0,
    kappa: float = 1.0,
    seed: int = 0,
) -> LeastSquares:
    """Gaussian rows and targets b_ij = a_ij . x_i + noise, x_i = x* + heterogeneity * normal.

    With no noise and no heterogeneity the problem is consistent: at the planted x* every sample's gradient vanishes.

    Args:
        workers: n.
        samples: l, of a worker.
        dimension: d.
        noise: standard deviation of the targets' noise.
        orthogonal: take from each worker's noise what its features explain; then grad f_i(x*) = 0, while the samples'
            own gradients do not vanish. Needs l > d.
        heterogeneity: how far the workers' own optima are apart, per coordinate.
        kappa: condition number of the rows' covariance, whose eigenvalues lie evenly on a logarithmic scale.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.standard_normal((workers, samples, dimension)))
    features = features * torch.logspace(0, -np.log10(kappa) / 2, dimension, dtype=torch.float64)
    planted = torch.from_numpy(rng.standard_normal(dimension))
    own = planted + heterogeneity * torch.from_numpy(rng.standard_normal((workers, dimension)))
    rest = noise * torch.from_numpy(rng.standard_normal((workers, samples, 1)))
    if orthogonal:
        rest = rest - features @ torch.linalg.lstsq(features, rest).solution
    return LeastSquares(features, (features @ own.unsqueeze(2) + rest).squeeze(2))


def split(
    features: np.ndarray, labels: np.ndarray, workers: int, *, by: Literal["iid", "label"] = "iid", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Deal data out to workers: (n, l, d) and (n, l), float64, l = N // n. The few samples left over are dropped.

    Args:
        features: (N, d).
        labels: (N,).
        workers: n.
        by: "iid" shuffles; "label" sorts after that, so that most workers see one label only.
        seed: of the shuffle.
    """
    order = np.random.default_rng(seed).permutation(len(labels))[: len(labels) // workers * workers]
    if by == "label":
        order = order[np.argsort(labels[order], kind="stable")]
    a = torch.from_numpy(np.asarray(features, dtype=np.float64)[order])
    b = torch.from_numpy(np.asarray(labels, dtype=np.float64)[order])
    return a.view(workers, -1, a.shape[1]), b.view(workers, -1)


def logistic(features: Tensor, labels: Tensor, kappa: float) -> Logistic:
    """l2-logistic regression whose ridge makes L / mu = kappa, L that of the least smooth f_i.

    Args:
        features: (n, l, d).
        labels: (n, l), -1 or 1.
        kappa: above 1.
    """
    return Logistic(features, labels, Logistic(features, labels).L / (kappa - 1))


def breast_cancer() -> tuple[np.ndarray, np.ndarray]:
    """Standardised features (569, 30) and labels -1 or 1 (569,) of the data set that comes with scikit-learn."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return (features - features.mean(axis=0)) / features.std(axis=0), 2.0 * labels - 1.0
