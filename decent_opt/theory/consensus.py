"""The consensus step size that is provably stable (Choco-Gossip, Koloskova, Stich and Jaggi 2019, theorem 2).

    rho = 1 - max(|l_2|, |l_n|),  beta = ||I - W||_2,  Q contractive with delta
    gamma = rho delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta)
    e_r = ||X - Xbar||^2 + ||X - Xhat||^2 shrinks by 1 - alpha a round,  alpha = rho^2 delta / 82

Safe for every vector, and 30 to 500 times smaller than what training bears: compressors bring defaults of their own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from decent_opt.errors import ConfigError


def choco_gamma(W: ArrayLike, delta: float) -> float:
    """gamma for a symmetric, doubly stochastic W, (n, n), and a compressor with this delta.

    Raises:
        ConfigError: W is not symmetric, its graph is not connected, or delta is not in (0, 1].
    """
    rho, beta = _rho_and_beta(W, delta)
    return rho * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)


def choco_rate(W: ArrayLike, delta: float) -> float:
    """alpha: by how much e_r shrinks at least in a round with `choco_gamma`."""
    rho, _ = _rho_and_beta(W, delta)
    return rho**2 * delta / 82


def _rho_and_beta(W: ArrayLike, delta: float) -> tuple[float, float]:
    matrix = np.asarray(W, dtype=np.float64)
    if not 0 < delta <= 1:
        raise ConfigError(f"delta: must be a number > 0 and <= 1, got {delta!r}")
    if not np.array_equal(matrix, matrix.T):
        raise ConfigError("topology: the theory of gamma needs a symmetric W, and this one is directed")
    values = np.linalg.eigvalsh(matrix)
    rho = 1.0 - (max(abs(values[0]), abs(values[-2])) if len(values) > 1 else 0.0)
    if rho < 1e-12:
        raise ConfigError("topology: the theory of gamma needs a connected graph, and this one does not mix")
    return float(rho), float(1.0 - values[0])
