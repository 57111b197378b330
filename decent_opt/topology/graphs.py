"""Undirected graphs and their Metropolis-Hastings weights.

    W[k, j] = 1 / (1 + max(deg k, deg j))  for neighbours,      W[k, k] = 1 - sum_j W[k, j]

W is symmetric and doubly stochastic on any graph; on a regular one each weight is 1 / (degree + 1).
Source: Xiao, Boyd and Kim, "Distributed average consensus with least-mean-square deviation" (2007).
networkx is imported inside the functions, so that `import decent_opt` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from decent_opt.errors import ConfigError

if TYPE_CHECKING:
    import networkx as nx


def metropolis_hastings(graph: nx.Graph) -> np.ndarray:
    """The Metropolis-Hastings matrix of an undirected graph; worker k is the k-th node in sorted order."""
    import networkx as nx

    if graph.is_directed():
        raise ConfigError(
            f"topology: Metropolis-Hastings weights need an undirected graph, got a {type(graph).__name__}; "
            "use graph.to_undirected(), or pass a matrix of your own"
        )
    edges = nx.to_numpy_array(graph, nodelist=sorted(graph), weight=None) > 0
    np.fill_diagonal(edges, False)
    degree = edges.sum(axis=1)
    W: np.ndarray = edges / (1.0 + np.maximum.outer(degree, degree))
    np.fill_diagonal(W, 1.0 - W.sum(axis=1))
    return W


def ring(size: int) -> nx.Graph:
    """Everyone between two neighbours; two workers are a pair, one is alone."""
    import networkx as nx

    return nx.cycle_graph(size)


def star(size: int) -> nx.Graph:
    """Everyone with worker 0 only."""
    import networkx as nx

    return nx.star_graph(size - 1)


def hypercube(size: int) -> nx.Graph:
    """Neighbours differ in one binary digit of their rank."""
    import networkx as nx

    dimensions = size.bit_length() - 1
    if size != 2**dimensions:
        raise ConfigError(
            f"topology: hypercube needs a power of two workers, got {size}; use {2**dimensions} or "
            f'{2 ** (dimensions + 1)} workers, or "exponential", which works with any number'
        )
    graph = nx.empty_graph(size)
    graph.add_edges_from((k, k ^ 2**i) for k in range(size) for i in range(dimensions))
    return graph
