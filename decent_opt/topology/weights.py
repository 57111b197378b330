"""Mixing weights of an undirected graph: who counts how much with whom.

    Metropolis     W[k, j] = 1 / (1 + max(deg k, deg j))        for neighbours k, j
    uniform        W[k, j] = 1 / (1 + max over all deg)
    user           W[k, j] = "weight" of the edge
    fastest        the W[k, j] >= 0 that make ||W - J||_2 smallest

and W[k, k] = 1 - sum_j W[k, j]. Each W is symmetric, so that a row that sums to 1 makes it doubly stochastic. On a
regular graph Metropolis and uniform are the same 1 / (degree + 1); elsewhere Metropolis lets two workers of small
degree mix faster than the busiest allows. Plain 1 / (deg k + 1) is not doubly stochastic and is not offered.
Sources: Xiao, Boyd and Kim, "Distributed average consensus with least-mean-square deviation" (2007); Boyd, Diaconis
and Xiao, "Fastest mixing Markov chain on a graph" (2004).
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
    edges = _edges(graph)
    degree = edges.sum(axis=1)
    return _with_self_weights(edges / (1.0 + np.maximum.outer(degree, degree)))


def uniform_weights(graph: nx.Graph) -> np.ndarray:
    """The same weight 1 / (1 + largest degree) on every edge; worker k is the k-th node in sorted order."""
    edges = _edges(graph)
    return _with_self_weights(edges / (1.0 + edges.sum(axis=1).max()))


def graph_weights(graph: nx.Graph) -> np.ndarray:
    """W of a user's graph on the nodes 0 ... n-1: the "weight" of its edges if they have one, else Metropolis.

    Loops carry no weight of their own: what the edges of a worker leave of 1 is its weight for itself.
    """
    import networkx as nx

    _refuse_directed(graph)
    size = graph.number_of_nodes()
    if set(graph) != set(range(size)):
        raise ConfigError(
            f"topology: the nodes of a graph must be the ranks 0 to {size - 1}, got {_few(list(graph))}; "
            "relabel them, e.g. with networkx.convert_node_labels_to_integers"
        )
    weights = [weight for k, j, weight in graph.edges(data="weight") if k != j]
    missing = sum(weight is None for weight in weights)
    if missing == len(weights):
        return metropolis_hastings(graph)
    if missing:
        raise ConfigError(
            f"topology: {missing} of the graph's {len(weights)} edges have no weight; give all of them one, or none"
        )
    try:
        edges = nx.to_numpy_array(graph, nodelist=range(size), dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"topology: the weights of a graph's edges must be numbers, got {_few(weights)}") from None
    np.fill_diagonal(edges, 0.0)
    return _with_self_weights(edges)


def fastest_mixing(graph: nx.Graph) -> np.ndarray:
    """The symmetric weights on this graph with the largest spectral gap: a semidefinite program, solved offline.

    Needs cvxpy. Solvers differ in the last digits: compute W once, save it, and give the same matrix to all workers.
    """
    try:
        import cvxpy as cp
    except ImportError:
        raise ConfigError(
            "topology: fastest_mixing needs cvxpy, which is not installed (pip install cvxpy); "
            "metropolis_hastings(graph) and uniform_weights(graph) need nothing"
        ) from None
    edges = _edges(graph)
    size, pairs = len(edges), np.argwhere(np.triu(edges))
    if len(pairs) == 0:
        return np.eye(size)
    difference = np.zeros((len(pairs), size))  # row e: x_k - x_j of the edge e = (k, j), so that W = I - D^T diag(w) D
    difference[np.arange(len(pairs)), pairs[:, 0]], difference[np.arange(len(pairs)), pairs[:, 1]] = 1.0, -1.0
    w = cp.Variable(len(pairs), nonneg=True)
    W = np.eye(size) - difference.T @ cp.diag(w) @ difference
    problem = cp.Problem(cp.Minimize(cp.norm(W - np.full((size, size), 1 / size), 2)), [cp.diag(W) >= 0])
    problem.solve()
    if w.value is None:
        raise ConfigError(f"topology: the solver found no weights for this graph (it ended as {problem.status!r})")
    weights = np.zeros((size, size))
    weights[pairs[:, 0], pairs[:, 1]] = np.maximum(w.value, 0.0)
    weights += weights.T
    return _with_self_weights(weights / max(1.0, weights.sum(axis=1).max()))  # the solver is right to 1e-6 or so


def _edges(graph: nx.Graph) -> np.ndarray:
    """True where two different workers are linked."""
    import networkx as nx

    _refuse_directed(graph)
    if not len(graph):
        raise ConfigError("topology: the graph has no nodes; it needs one for each worker")
    edges: np.ndarray = nx.to_numpy_array(graph, nodelist=sorted(graph), weight=None) > 0
    np.fill_diagonal(edges, False)
    return edges


def _with_self_weights(weights: np.ndarray) -> np.ndarray:
    W = weights.copy()
    left = 1.0 - W.sum(axis=1)
    left[np.abs(left) < 1e-12] = 0.0  # twenty weights of 1/20 leave -2e-16, which is no weight
    np.fill_diagonal(W, left)
    return W


def _refuse_directed(graph: nx.Graph) -> None:
    if graph.is_directed():
        raise ConfigError(
            f"topology: the weights need an undirected graph, got a {type(graph).__name__}; "
            "use graph.to_undirected(), or pass a matrix of your own"
        )


def _few(values: list[object]) -> str:
    return ", ".join(map(repr, values[:3])) + (", ..." if len(values) > 3 else "")
