"""Weights of undirected graphs: the formulas, a user's own, and the fastest."""

from __future__ import annotations

import re
import sys
from math import cos, pi

import networkx as nx
import numpy as np
import pytest

from decent_opt.errors import ConfigError
from decent_opt.topology import (
    fastest_mixing,
    make_topology,
    metropolis_hastings,
    spectral_gap,
    uniform_weights,
)

CLAW = nx.Graph([(0, 1), (1, 2), (1, 3)])  # degrees 1, 3, 1, 1


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


def test_uniform_weights_are_those_of_the_busiest_worker():
    graph = nx.Graph([(0, 1), (1, 2), (1, 3), (3, 4)])
    np.testing.assert_allclose(uniform_weights(graph)[3], [0, 1 / 4, 0, 1 / 2, 1 / 4], atol=1e-16)
    assert metropolis_hastings(graph)[3, 4] == pytest.approx(1 / 3)


@pytest.mark.parametrize("spec", ["ring", "torus", "random-regular", "hypercube"])
def test_on_a_regular_graph_uniform_and_metropolis_are_the_same(spec):
    uniform = make_topology(f"{spec}:weights=uniform", 16).matrix(0)
    np.testing.assert_allclose(uniform, make_topology(spec, 16).matrix(0), atol=1e-16)


def test_metropolis_is_faster_than_uniform_on_a_lollipop():
    graph = nx.lollipop_graph(6, 4)
    gaps = [spectral_gap(make_topology(weigh(graph), 10)) for weigh in (metropolis_hastings, uniform_weights)]
    assert gaps[0] > 1.4 * gaps[1]


def test_a_graph_without_weights_gets_those_of_metropolis():
    graph = nx.petersen_graph()
    np.testing.assert_array_equal(make_topology(graph, 10).matrix(0), metropolis_hastings(graph))


def test_a_graph_goes_by_its_nodes_not_by_the_order_in_which_they_came():
    graph = nx.Graph([(2, 0), (0, 1)])
    assert make_topology(graph, 3).peers(0, 0).send == (1, 2)


def test_a_graph_with_weights_keeps_them_and_the_rest_is_for_oneself():
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.5), (1, 2, 0.25), (1, 1, 7.0)])
    W = make_topology(graph, 3).matrix(0)
    np.testing.assert_array_equal(W, [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]])


def test_weights_that_sum_to_one_but_for_rounding_leave_nothing_for_oneself():
    graph = nx.complete_graph(21)
    nx.set_edge_attributes(graph, 1 / 20, "weight")  # twenty of them sum to 1 + 2e-16
    W = make_topology(graph, 21).matrix(0)
    assert (W.diagonal() == 0).all()


def weighted(*edges: tuple[int, int, object]) -> nx.Graph:
    graph = nx.Graph()
    graph.add_weighted_edges_from(edges)
    return graph


@pytest.mark.parametrize(
    "graph, sentence",
    [
        (nx.DiGraph([(0, 1), (1, 0)]), "undirected graph, got a DiGraph; use graph.to_undirected()"),
        (nx.Graph(), "the graph has no nodes"),
        (nx.Graph([(1, 2)]), "the nodes of a graph must be the ranks 0 to 1, got 1, 2; relabel them"),
        (nx.Graph([("a", "b")]), "must be the ranks 0 to 1, got 'a', 'b'"),
        (nx.grid_2d_graph(2, 2), "must be the ranks 0 to 3, got (0, 0), (0, 1), (1, 0), ...; relabel"),
        (nx.Graph([(0, 1, {"weight": 0.5}), (1, 2)]), "1 of the graph's 2 edges have no weight"),
        (weighted((0, 1, "heavy")), "the weights of a graph's edges must be numbers, got 'heavy'"),
        (weighted((0, 1, -0.5)), "W[0, 1] is -0.5; every weight must be at least 0"),
        (weighted((0, 1, 0.75), (1, 2, 0.75)), "W[1, 1] is -0.5; every weight must be at least 0"),
        (weighted((0, 1, float("nan"))), "is nan; every weight must be finite"),
        (weighted((0, 1, 1.0)), "without ever blending all of them"),
        (nx.Graph([(0, 1), (2, 3)]), "nothing ever passes between worker 0 and worker 2"),
    ],
)
def test_a_graph_that_cannot_work_is_refused_in_words(graph, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_topology(graph, max(1, len(graph)))


def test_a_graph_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="'custom' is for 10 workers, but there are 8"):
        make_topology(nx.petersen_graph(), 8)


def test_fastest_mixing_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"fastest_mixing needs cvxpy.*metropolis_hastings"):
        fastest_mixing(CLAW)


def test_fastest_mixing_is_one_half_on_a_path():
    pytest.importorskip("cvxpy")
    topology = make_topology(fastest_mixing(nx.path_graph(8)), 8)
    # Known: weight 1/2 on every edge, and so a gap of 1 - cos(pi/n), 3/2 of Metropolis's. Solvers stop early.
    assert spectral_gap(topology) == pytest.approx(1 - cos(pi / 8), abs=1e-4)


def test_fastest_mixing_beats_metropolis():
    pytest.importorskip("cvxpy")
    graph = nx.lollipop_graph(6, 4)
    gaps = [spectral_gap(make_topology(weigh(graph), 10)) for weigh in (fastest_mixing, metropolis_hastings)]
    assert gaps[0] > gaps[1]
    assert make_topology(fastest_mixing(nx.empty_graph(1)), 1).size == 1
