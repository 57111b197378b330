"""Metropolis-Hastings weights and the named graphs, against their definitions and the small sizes."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from decent_opt.errors import ConfigError
from decent_opt.topology import NAMES, make_topology, metropolis_hastings


def test_metropolis_hastings_is_its_formula_on_an_irregular_graph():
    graph = nx.Graph([(0, 1), (1, 2), (1, 3)])  # degrees 1, 3, 1, 1
    expected = np.array([[3, 1, 0, 0], [1, 1, 1, 1], [0, 1, 3, 0], [0, 1, 0, 3]]) / 4
    np.testing.assert_allclose(metropolis_hastings(graph), expected, atol=1e-16)


def test_metropolis_hastings_ignores_self_loops_edge_weights_and_the_order_of_insertion():
    graph = nx.Graph([(1, 3), (3, 3), (2, 1), (1, 0)])
    graph.add_edge(0, 1, weight=-7.0)
    plain = nx.Graph([(0, 1), (1, 2), (1, 3)])
    np.testing.assert_array_equal(metropolis_hastings(graph), metropolis_hastings(plain))


def test_metropolis_hastings_refuses_a_directed_graph():
    with pytest.raises(ConfigError, match=r"undirected graph, got a DiGraph.*to_undirected"):
        metropolis_hastings(nx.DiGraph([(0, 1)]))


def test_ring_weights_are_a_third_each():
    W = make_topology("ring", 5).matrix(0)
    P = np.roll(np.eye(5), 1, axis=0)
    np.testing.assert_allclose(W, (np.eye(5) + P + P.T) / 3, atol=1e-16)


def test_star_has_worker_0_in_the_middle():
    peers = make_topology("star", 4).peers
    assert peers(0, 0).send == (1, 2, 3)
    assert peers(2, 0).send == (0,)
    assert peers(2, 0).self_weight == pytest.approx(3 / 4)


def test_hypercube_neighbours_differ_in_one_digit():
    assert make_topology("hypercube", 8).peers(5, 0).send == (0b001, 0b100, 0b111)


@pytest.mark.parametrize("size", [3, 6, 100])
def test_hypercube_says_which_sizes_are_allowed(size):
    with pytest.raises(ConfigError, match=rf'hypercube .* got {size}; use \d+ or \d+ workers, or "exponential"'):
        make_topology("hypercube", size)


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_is_alone_and_two_are_a_pair(name):
    assert make_topology(name, 1).matrix(0).tolist() == [[1.0]]
    assert make_topology(name, 1).peers(0, 0).receive == {}
    assert make_topology(name, 2).matrix(0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
