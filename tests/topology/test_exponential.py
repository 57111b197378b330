"""Exponential graphs: who sends to whom, and the exact average after log2 n one-peer rounds."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from decent_opt.topology import Topology, make_topology


def period_product(topology: Topology) -> np.ndarray:
    return reduce(lambda product, r: topology.matrix(r) @ product, range(topology.period), np.eye(topology.size))


def test_static_graph_sends_one_two_and_four_places_ahead():
    peers = make_topology("exponential", 8).peers(6, 0)
    assert peers.send == (0, 2, 7)
    assert peers.receive == {2: 0.25, 4: 0.25, 5: 0.25}
    assert peers.self_weight == 0.25


def test_one_peer_graph_walks_the_hops_in_turn():
    topology = make_topology("one-peer-exponential", 6)
    assert topology.period == 3
    assert [topology.peers(1, round).send for round in range(4)] == [(2,), (3,), (5,), (2,)]
    assert [topology.peers(1, round).receive for round in range(4)] == [
        {0: 0.5},
        {5: 0.5},
        {3: 0.5},
        {0: 0.5},
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_one_peer_period_is_the_exact_average_for_powers_of_two(size):
    product = period_product(make_topology("one-peer-exponential", size))
    np.testing.assert_array_equal(product, np.full((size, size), 1 / size))  # bit for bit: all weights are 2^-i


def test_one_peer_period_is_not_exact_for_other_sizes():
    product = period_product(make_topology("one-peer-exponential", 100))
    assert np.linalg.norm(product - 1 / 100, 2) == pytest.approx(0.192, abs=5e-4)
