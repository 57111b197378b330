"""How fast a topology brings its workers together: the two numbers that the theory asks of W.

    rho  = 1 - ||W - J||_2      spectral gap: a round shrinks the distance to the average by 1 - rho
    beta = ||I - W||_2          how far a round can move a worker; sets the step size of compressed gossip

J = 11^T / n, and the 2-norm is the largest singular value, for directed graphs too. A schedule is judged by
its whole period, since one round of one-peer exponential hardly contracts while log2 n of them are exact:

    1 - rho = ||prod_r (W_r - J)||_2 ^ (1 / period)
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from decent_opt.topology.base import Topology

# A period that is exact in theory misses J by about 1e-16 in float64. The root of that must not be taken for
# slow mixing: (1e-16)^(1/7) = 0.005.
_ROUNDING = 1e-13


def spectral_gap(topology: Topology) -> float:
    """rho: 1.0 if a period of rounds is an exact average, near 0 if the workers mix slowly."""
    return 1.0 - consensus_factor(topology)


def consensus_factor(topology: Topology) -> float:
    """1 - rho: by how much a round shrinks the distance to the average, at worst, over a period of rounds."""
    J = np.full((topology.size, topology.size), 1 / topology.size)
    deviations = (topology.matrix(round) - J for round in range(topology.period))
    over_a_period = float(np.linalg.norm(reduce(lambda product, D: D @ product, deviations), 2))
    return over_a_period ** (1 / topology.period) if over_a_period > _ROUNDING else 0.0


def beta(topology: Topology) -> float:
    """||I - W||_2, in the round where it is largest."""
    identity = np.eye(topology.size)
    return max(float(np.linalg.norm(identity - topology.matrix(r), 2)) for r in range(topology.period))


def rounds_to_reduce(topology: Topology, factor: float = 100.0) -> int:
    """The first round after which any disagreement has shrunk by `factor`, wherever the workers started.

    ||prod_r (W_r - J)||_2 never grows with the rounds, so whole periods are found by halving: the powers 1, 2, 4, ...
    of a period's product that are not yet enough, the largest first; then single rounds.
    """
    J = np.full((topology.size, topology.size), 1 / topology.size)
    deviations = [topology.matrix(round) - J for round in range(topology.period)]
    powers = [reduce(lambda product, D: D @ product, deviations)]
    while np.linalg.norm(powers[-1], 2) > 1 / factor:
        powers.append(powers[-1] @ powers[-1])
    reached, rounds = np.eye(topology.size) - J, 0
    for i in reversed(range(len(powers) - 1)):
        further = powers[i] @ reached
        if np.linalg.norm(further, 2) > 1 / factor:
            reached, rounds = further, rounds + 2**i * topology.period
    while np.linalg.norm(reached, 2) > 1 / factor:
        reached, rounds = deviations[rounds % topology.period] @ reached, rounds + 1
    return rounds
