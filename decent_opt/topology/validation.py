"""What a cycle of mixing matrices must satisfy, and the sentence that a user reads where it does not.

1. Each W is doubly stochastic: no negative weight, every row and every column sums to 1. Then a round neither
   moves the average of the workers (columns) nor scales what they agree on (rows).
2. Repeated rounds reach consensus: the product of enough W's has no zero entry left. For doubly stochastic
   matrices this is the same as convergence to J = 11^T / n (Perron-Frobenius), and it only asks which entries
   are positive: it is decided here exactly, without eigenvalues and their tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from decent_opt.errors import ConfigError

# Sums of float64 weights are right to 1e-15. A row that sums to 1 + e scales the model by (1 + e)^rounds: at
# e = 1e-8 by 1 % over a million. Float32 weights (thrice 1/3 is 1 + 3e-8) and rounded ones do not pass.
SUM_TOLERANCE = 1e-8


def check_doubly_stochastic(matrices: Sequence[np.ndarray]) -> None:
    """Raise a ConfigError that names the first matrix, row, column or entry that is not allowed."""
    if not matrices:
        raise ConfigError("topology: got no matrices; a schedule needs at least one round")
    for round, W in enumerate(matrices):
        name = "W" if len(matrices) == 1 else f"W of round {round}"
        if W.ndim != 2 or W.shape[0] != W.shape[1] or W.size == 0:
            raise ConfigError(f"topology: {name} must be a square matrix (n, n), got shape {W.shape}")
        if W.shape != matrices[0].shape:
            raise ConfigError(
                f"topology: {name} is for {len(W)} workers and W of round 0 for {len(matrices[0])}; "
                "all rounds must have the same workers"
            )
        for wrong, allowed in ((~np.isfinite(W), "finite"), (W < 0, "at least 0")):
            if wrong.any():
                k, j = np.argwhere(wrong)[0]
                raise ConfigError(f"topology: {name}[{k}, {j}] is {W[k, j]}; every weight must be {allowed}")
        for line, sums in (("row", W.sum(axis=1)), ("column", W.sum(axis=0))):
            k = np.abs(sums - 1).argmax()
            if abs(sums[k] - 1) > SUM_TOLERANCE:
                raise ConfigError(
                    f"topology: {line} {k} of {name} sums to {sums[k]:.10g}; every row and every column must "
                    f"sum to 1 within {SUM_TOLERANCE:g} (compute the weights in float64)"
                )


def is_symmetric(W: np.ndarray) -> bool:
    """Does every worker give what it gets, up to the tolerance of the sums?"""
    return bool(np.allclose(W, W.T, rtol=0, atol=SUM_TOLERANCE))


def check_consensus(matrices: Sequence[np.ndarray]) -> None:
    """Raise a ConfigError if no number of rounds brings the workers of these matrices together."""
    linked = reduce(np.logical_or, (W > 0 for W in matrices))
    unreached = np.flatnonzero(~_reached_from_worker_0(linked))
    if len(unreached):
        raise ConfigError(
            f"topology: nothing ever passes between worker 0 and worker {unreached[0]} "
            f"({len(unreached)} of {len(linked)} workers are cut off); the graph must be connected"
        )
    everyone_keeps_a_share = all(W.diagonal().all() for W in matrices)  # then connected is enough
    if not everyone_keeps_a_share and not _fills_up(matrices):
        raise ConfigError(
            "topology: the workers pass their parameters around without ever blending all of them; "
            "give every worker a positive weight for itself (the diagonal of W)"
        )


def _reached_from_worker_0(linked: np.ndarray) -> np.ndarray:
    """Whom a walk along the links reaches.

    One direction is enough: as much weight flows into any group of workers as out of it, so what a walk can
    leave it can enter again.
    """
    reached: np.ndarray = np.arange(len(linked)) == 0
    frontier = reached
    while frontier.any():
        frontier = linked[frontier].any(axis=0) & ~reached
        reached = reached | frontier
    return reached


def _fills_up(matrices: Sequence[np.ndarray]) -> bool:
    """Whether some power of the product over a period is positive everywhere.

    Power n^2 - 2n + 2 decides (Wielandt 1950) and so does any larger one: square it 2 log2 n times.
    """
    product = reduce(lambda product, W: _pattern(W @ product), matrices, np.eye(len(matrices[0])))
    for _ in range(2 * len(product).bit_length()):
        product = _pattern(product @ product)
    return bool(product.all())


def _pattern(W: np.ndarray) -> np.ndarray:
    """1.0 where W is positive: products of patterns never underflow."""
    return np.where(W > 0, 1.0, 0.0)
