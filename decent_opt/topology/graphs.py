"""Undirected graphs by name. Their weights are another matter: `weights`.

A ring, a path or a torus goes by rank. torchrun numbers the ranks host by host, so neighbours in rank are mostly
neighbours on one machine: a ring over h hosts crosses between machines h times, whatever the number of workers.
networkx is imported inside the functions, so that `import decent_opt` stays quick.
"""

from __future__ import annotations

import random
from math import isqrt
from typing import TYPE_CHECKING

from decent_opt.errors import ConfigError

if TYPE_CHECKING:
    import networkx as nx


def ring(size: int) -> nx.Graph:
    """Everyone between two neighbours; two workers are a pair, one is alone."""
    import networkx as nx

    return nx.cycle_graph(size)


def path(size: int) -> nx.Graph:
    """A ring that is cut open between the last worker and worker 0."""
    import networkx as nx

    return nx.path_graph(size)


def star(size: int) -> nx.Graph:
    """Everyone with worker 0 only."""
    import networkx as nx

    return nx.star_graph(size - 1)


def torus(size: int, shape: tuple[int, int] | None = None) -> nx.Graph:
    """Worker r * columns + c stands in row r and column c; each row and each column is a ring.

    Args:
        size: how many workers there are.
        shape: rows and columns; if not given, as square as the size allows. Prime sizes are refused, since they
            would silently be a ring, from 5 on: up to 3 workers that is everyone with everyone anyway.
    """
    import networkx as nx

    if shape is None:
        rows = next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)
        if rows == 1 and size > 3:
            raise ConfigError(
                f"topology: torus needs rows x columns workers with at least 2 of each, got the prime {size}; use "
                f'{size - 1} or {size + 1} workers, or "ring" or "base", which work with any number'
            )
        shape = rows, size // rows
    if shape[0] * shape[1] != size:
        raise ConfigError(
            f"topology: torus of {shape[0]}x{shape[1]} has {shape[0] * shape[1]} places, but there are {size} workers; "
            'rows x columns must be their number, or use "torus" for the squarest'
        )
    graph = nx.grid_2d_graph(*shape, periodic=True)
    return nx.relabel_nodes(graph, {(row, column): row * shape[1] + column for row, column in graph})


def hypercube(size: int) -> nx.Graph:
    """Neighbours differ in one binary digit of their rank."""
    import networkx as nx

    dimensions = check_power_of_two("hypercube", size)
    graph = nx.empty_graph(size)
    graph.add_edges_from((k, k ^ 2**i) for k in range(size) for i in range(dimensions))
    return graph


def check_power_of_two(name: str, size: int) -> int:
    """log2 of the size, or a ConfigError that says which sizes there are."""
    dimensions = size.bit_length() - 1
    if size != 2**dimensions:
        raise ConfigError(
            f"topology: {name} needs a power of two workers, got {size}; use {2**dimensions} or "
            f'{2 ** (dimensions + 1)} workers, or "exponential" or "base", which work with any number'
        )
    return dimensions


def random_regular(size: int, degree: int | None = None, seed: int = 0) -> nx.Graph:
    """A connected graph drawn among those where everyone has `degree` neighbours.

    A pure function of its arguments, so that all workers draw the same one: graphs are drawn from a generator of its
    own until one is connected. Without a degree it is 4, or everyone in a world of less than 6.
    """
    import networkx as nx

    if degree is None:
        degree = min(4, size - 1)
    if degree >= size or (degree < 2 and size > 2):
        allowed = f"2 to {size - 1}" if size > 2 else str(size - 1)
        raise ConfigError(
            f"topology: random-regular with degree={degree} cannot connect {size} workers; allowed are {allowed}"
        )
    if size * degree % 2:
        raise ConfigError(
            f"topology: random-regular needs size x degree to be even, got {size} x {degree}; "
            f"use degree={degree - 1 if degree > 2 else degree + 1}"
        )
    generator = random.Random(seed)
    while True:  # a draw is connected with probability near 1, for degree 2 near 1 / sqrt(size)
        graph = nx.random_regular_graph(degree, size, seed=generator)
        if nx.is_connected(graph):
            return graph
