"""From what a user writes to a topology: a name, a matrix, a schedule of matrices, or an object of their own.

make_topology("ring", 8)
make_topology(metropolis_hastings(nx.grid_2d_graph(4, 4, periodic=True)), 16)
make_topology([W_even, W_odd], 8)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from decent_opt.errors import ConfigError
from decent_opt.topology import exponential, graphs
from decent_opt.topology.base import CyclicTopology, Topology

TopologySpec: TypeAlias = "str | ArrayLike | Topology"

_MATRICES: dict[str, Callable[[int], Sequence[np.ndarray]]] = {
    "ring": lambda size: [graphs.metropolis_hastings(graphs.ring(size))],
    "complete": lambda size: [np.full((size, size), 1 / size)],
    "star": lambda size: [graphs.metropolis_hastings(graphs.star(size))],
    "hypercube": lambda size: [graphs.metropolis_hastings(graphs.hypercube(size))],
    "exponential": lambda size: [exponential.static_exponential(size)],
    "one-peer-exponential": exponential.one_peer_exponential,
}
NAMES = tuple(_MATRICES)


def make_topology(spec: TopologySpec, size: int) -> CyclicTopology:
    """The topology that `spec` describes, for `size` workers.

    Args:
        spec: one of `NAMES`; or W as an array, tensor or nested list (n, n); or a schedule (period, n, n) of
            them; or an object with `name`, `size`, `period` and `matrix(round)`, read over one period. Peers
            follow from the matrices, so that no two workers disagree about who sends to whom.
        size: how many workers there are.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"size: the number of workers must be a whole number from 1 on, got {size!r}")
    topology = _read(spec, size)
    if topology.size != size:
        raise ConfigError(
            f"topology: {topology.name!r} is for {topology.size} workers, but there are {size}; "
            "W must have one row and one column for each"
        )
    return topology


def _read(spec: Any, size: int) -> CyclicTopology:
    if isinstance(spec, CyclicTopology):
        return spec
    if isinstance(spec, str):
        if spec not in _MATRICES:
            raise ConfigError(f"topology: unknown name {spec!r}; {_allowed()}")
        return CyclicTopology(_MATRICES[spec](size), spec)
    if hasattr(spec, "matrix"):
        if not isinstance(spec.period, int) or spec.period < 1:
            raise ConfigError(f"topology: the period must be a whole number from 1 on, got {spec.period!r}")
        return CyclicTopology([spec.matrix(round) for round in range(spec.period)], spec.name)
    return CyclicTopology(_as_matrices(spec), "custom")


def _as_matrices(spec: Any) -> list[np.ndarray]:
    if hasattr(spec, "detach"):  # a tensor, on whatever device and of whatever type
        spec = spec.detach().cpu().double()
    try:
        array = np.asarray(spec, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(())
    if array.ndim == 0:
        raise ConfigError(f"topology: cannot read {spec!r} as a matrix; {_allowed()}")
    return list(array) if array.ndim == 3 else [array]


def _allowed() -> str:
    return f"allowed are {', '.join(NAMES)}, a matrix (n, n) of weights, or a Topology"
