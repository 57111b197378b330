"""The consensus step size that is proved to work, and its proved rate (Choco-Gossip, arXiv 1902.00340, Theorem 2).

    rho   = 1 - max(|lambda_2|, |lambda_n|) of W         beta = ||I - W||_2        delta of the compressor
    gamma = rho delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta)
    E e_{r+1} <= (1 - alpha) e_r,   alpha = rho^2 delta / 82,   e = ||X - Xbar||^2 + ||X - Xhat||^2

for rounds of gossip alone, with e taken between sending and mixing: in the order of the paper that is at the end of a
round. W has to be symmetric, doubly stochastic and the same in every round. Both numbers are far on the safe side:
measured, gamma may be 30 to 500 times larger (docs/theory.md).
"""

from __future__ import annotations

import numpy as np

from decent_opt.errors import ConfigError
from decent_opt.topology import Topology, beta, make_topology, spectral_gap
from decent_opt.topology.validation import is_symmetric

Mixing = Topology | np.ndarray
"""A topology of one matrix, or the matrix W itself."""


def choco_gamma(mixing: Mixing, delta: float) -> float:
    """The gamma of the theorem.

    Raises:
        ConfigError: W changes over the rounds, is not symmetric or not a mixing matrix; delta is not in (0, 1].
    """
    rho, b = _rho_and_beta(mixing, delta)
    return rho * delta / (16 * rho + rho**2 + 4 * b**2 + 2 * rho * b**2 - 8 * rho * delta)


def choco_rate(mixing: Mixing, delta: float) -> float:
    """The alpha of the theorem: a round takes this share of the error away, at least and on average.

    Raises:
        ConfigError: as for `choco_gamma`.
    """
    rho, _ = _rho_and_beta(mixing, delta)
    return rho**2 * delta / 82


def _rho_and_beta(mixing: Mixing, delta: float) -> tuple[float, float]:
    if not 0 < delta <= 1:
        raise ConfigError(f"delta: allowed is a number > 0 and <= 1, got {delta!r}")
    topology = make_topology(mixing, len(mixing)) if isinstance(mixing, np.ndarray) else mixing
    if topology.period > 1:
        raise ConfigError(
            f"topology: the theory of public copies needs the same W in every round, but {topology.name} has "
            f'{topology.period} different ones; use a graph that does not change, such as "ring"'
        )
    W = topology.matrix(0)
    if not is_symmetric(W):
        name = "this one" if topology.name == "custom" else topology.name
        raise ConfigError(
            f"topology: the theory of public copies needs a symmetric W, but {name} is directed; use an "
            'undirected graph, such as "ring", or set gamma yourself'
        )
    return spectral_gap(topology), beta(topology)
