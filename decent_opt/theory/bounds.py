"""The convergence bounds of PD-SGDM and CPD-SGDM (Theorems 1 and 2 of arXiv 2008.10435, constants derived anew).

Assumed: each f_k is L-smooth; gradients are unbiased with variance sigma^2 and E||g||^2 <= G^2, which hides how much
the workers differ; W is symmetric and doubly stochastic. If lr <= (1 - mu)^2 / (2 L), then over T steps

    mean E||grad f(xbar)||^2 <= 2 (1 - mu) (f(x_0) - f*) / (lr T) + lr L sigma^2 / ((1 - mu)^2 n) + L^2 C

where C bounds (1/n) sum_k E||x_k - xbar||^2 at every step:

    C = 2 lr^2 p^2 G^2 / (1 - mu)^2 * (1 + 4 / rho^2)       parameters are sent
    C = 2 lr^2 p^2 G^2 / (1 - mu)^2 * (1 + 8 / alpha^2)     compressed differences, with gamma and alpha of consensus.py

The bounds hold and are loose: measured consensus errors are 100 to 700 times smaller than the first C.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the bounds need to know of a problem.

    Attributes:
        workers: n.
        L: smoothness of every f_k.
        sigma: E||g_k(x) - grad f_k(x)||^2 <= sigma^2.
        G: E||g_k(x)||^2 <= G^2 wherever the workers go.
        gap: f(x_0) - f*.
    """

    workers: int
    L: float
    sigma: float
    G: float
    gap: float


def largest_lr(L: float, momentum: float = 0.0) -> float:
    """(1 - mu)^2 / (2 L): up to here the bounds are proved."""
    return (1 - momentum) ** 2 / (2 * L)


def consensus_bound(G: float, lr: float, period: int, rho: float, momentum: float = 0.0) -> float:
    """C of PD-SGDM; rho is the spectral gap of W."""
    return 2 * (lr * period * G / (1 - momentum)) ** 2 * (1 + 4 / rho**2)


def compressed_consensus_bound(G: float, lr: float, period: int, alpha: float, momentum: float = 0.0) -> float:
    """C of CPD-SGDM; alpha is `choco_rate`, and gamma has to be `choco_gamma`."""
    return 2 * (lr * period * G / (1 - momentum)) ** 2 * (1 + 8 / alpha**2)


def gradient_bound(problem: Constants, lr: float, steps: int, consensus: float, momentum: float = 0.0) -> float:
    """The bound on the average of E||grad f(xbar_t)||^2 over the steps; `consensus` is C of either algorithm.

    It is proved for lr <= `largest_lr`, and says nothing beyond: infinity is returned there.
    """
    if lr > largest_lr(problem.L, momentum):
        return float("inf")
    start = 2 * (1 - momentum) * problem.gap / (lr * steps)
    noise = lr * problem.L * problem.sigma**2 / ((1 - momentum) ** 2 * problem.workers)
    return start + noise + problem.L**2 * consensus
