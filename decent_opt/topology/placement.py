"""Which worker takes which place in a graph.

Graphs are written for ranks that are numbered host by host, as torchrun does: then a ring, a path, a torus by rows
and a hierarchy keep most of their edges inside a machine, and nothing is to be done. A launcher that deals ranks out
in turns (rank r on host r mod h, as `mpirun --map-by node` does) breaks that; `permute` puts it right:

    order = sorted(range(n), key=lambda rank: (host_of[rank], rank))
    permute(make_topology("ring", n), order)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decent_opt.errors import ConfigError
from decent_opt.topology.base import CyclicTopology, Topology


def permute(topology: Topology, order: Sequence[int]) -> CyclicTopology:
    """The same graph with worker `order[i]` in place i. The spectral gap stays, only who is whose neighbour changes."""
    places = [int(rank) for rank in order]
    if sorted(places) != list(range(topology.size)):
        raise ConfigError(
            f"order: must name each of the ranks 0 to {topology.size - 1} once, got {len(places)} ranks: {places[:8]}"
        )
    place_of = np.argsort(places)
    matrices = [topology.matrix(r)[np.ix_(place_of, place_of)] for r in range(topology.period)]
    return CyclicTopology(matrices, f"{topology.name}, permuted")
