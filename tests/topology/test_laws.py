"""What holds for every topology: W is doubly stochastic, and peers are exactly what W says."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_opt.topology import NAMES, Topology, make_topology, metropolis_hastings, spectral_gap


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    kind = draw(st.sampled_from([*NAMES, "graph", "permutations"]))
    if kind == "hypercube":
        return make_topology(kind, 2 ** draw(st.integers(0, 5)))
    size = draw(st.integers(1, 40))
    if kind == "graph":  # a tree makes it connected, anything may be added
        graph = nx.random_labeled_tree(size, seed=draw(st.integers(0, 2**16)))
        workers = st.integers(0, size - 1)
        graph.add_edges_from(draw(st.lists(st.tuples(workers, workers), max_size=2 * size)))
        return make_topology(metropolis_hastings(graph), size)
    if kind == "permutations":  # every doubly stochastic matrix is a mean of permutations (Birkhoff)
        orders = draw(st.lists(st.permutations(range(size)), min_size=1, max_size=4))
        shares = [np.eye(size), np.roll(np.eye(size), 1, axis=0), *(np.eye(size)[order] for order in orders)]
        return make_topology(np.mean(shares, axis=0), size)
    return make_topology(kind, size)


@given(topologies())
def test_every_matrix_is_doubly_stochastic(topology):
    for round in range(topology.period):
        W = topology.matrix(round)
        assert W.shape == (topology.size, topology.size)
        assert W.dtype == np.float64
        assert (W >= 0).all()
        # sums of at most 40 float64 weights
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-14)
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-14)


@given(topologies())
def test_peers_are_what_the_matrix_says(topology):
    for round in range(2 * topology.period):
        rebuilt = np.zeros((topology.size, topology.size))
        for rank in range(topology.size):
            peers = topology.peers(rank, round)
            rebuilt[rank, rank] = peers.self_weight
            for j, weight in peers.receive.items():
                rebuilt[rank, j] = weight
            assert rank not in peers.receive
            assert list(peers.receive) == sorted(peers.receive)
            assert all(weight > 0 for weight in peers.receive.values())
        np.testing.assert_array_equal(rebuilt, topology.matrix(round))


@given(topologies())
def test_every_message_sent_is_expected_and_every_expected_one_is_sent(topology):
    for round in range(topology.period):
        peers = [topology.peers(rank, round) for rank in range(topology.size)]
        sent = {(k, i) for k in range(topology.size) for i in peers[k].send}
        expected = {(j, k) for k in range(topology.size) for j in peers[k].receive}
        assert sent == expected
        assert all(p.send == tuple(sorted(p.send)) for p in peers)


@given(topologies())
@settings(max_examples=50)
def test_the_gap_of_a_connected_topology_is_a_number_in_0_1(topology):
    # Everyone keeps a share here, so even the worst direction shrinks; 1e-12 is rounding.
    assert 0 < spectral_gap(topology) <= 1 + 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_repeats_and_remembers(name):
    topology = make_topology(name, 8)
    assert topology.peers(3, topology.period) is topology.peers(3, 0)
    assert topology.matrix(topology.period + 1) is topology.matrix(1)
