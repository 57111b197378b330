"""The named graphs, against their definitions and the small sizes."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest

from decent_opt.errors import ConfigError
from decent_opt.topology import NAMES, make_topology

# A name as it must be written for a test, where the name alone is not enough.
SPECS = [*(name for name in NAMES if name != "hierarchical"), "hierarchical:group=1"]


def neighbours(spec: str, size: int) -> list[tuple[int, ...]]:
    topology = make_topology(spec, size)
    return [topology.peers(rank, 0).send for rank in range(size)]


def test_ring_weights_are_a_third_each():
    W = make_topology("ring", 5).matrix(0)
    P = np.roll(np.eye(5), 1, axis=0)
    np.testing.assert_allclose(W, (np.eye(5) + P + P.T) / 3, atol=1e-16)


def test_star_has_worker_0_in_the_middle():
    peers = make_topology("star", 4).peers
    assert peers(0, 0).send == (1, 2, 3)
    assert peers(2, 0).send == (0,)
    assert peers(2, 0).self_weight == pytest.approx(3 / 4)


def test_path_is_a_ring_that_is_cut_open():
    assert neighbours("path", 4) == [(1,), (0, 2), (1, 3), (2,)]


def test_torus_goes_by_rows():
    assert neighbours("torus", 12)[0] == (1, 3, 4, 8)  # 3 x 4: left, right, below, above
    assert neighbours("torus:4x3", 12)[0] == (1, 2, 3, 9)
    assert neighbours("torus:shape=2x6", 12)[7] == (1, 6, 8)  # up and down are the same worker


def test_a_torus_of_one_row_is_a_ring_and_is_made_only_on_demand():
    assert neighbours("torus:1x7", 7) == neighbours("ring", 7)
    assert neighbours("torus", 3) == neighbours("ring", 3) == neighbours("complete", 3)


@pytest.mark.parametrize("size", [5, 7, 97])
def test_torus_says_what_to_use_for_prime_sizes(size):
    with pytest.raises(ConfigError, match=rf'prime {size}; use {size - 1} or {size + 1} workers, or "ring" or "base"'):
        make_topology("torus", size)


@pytest.mark.parametrize("size, degree", [(6, 2), (9, 4), (10, 3), (32, 5), (40, 2)])
def test_random_regular_is_regular_connected_and_a_pure_function_of_its_arguments(size, degree):
    random.seed(0)
    first = make_topology(f"random-regular:degree={degree},seed=3", size)
    random.seed(1)
    np.random.seed(1)
    again = make_topology(f"random-regular:seed=3,degree={degree}", size)
    np.testing.assert_array_equal(first.matrix(0), again.matrix(0))
    assert all(len(first.peers(rank, 0).send) == degree for rank in range(size))
    assert nx.is_connected(nx.from_numpy_array(first.matrix(0)))


def test_random_regular_leaves_the_global_generators_alone():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    make_topology("random-regular", 16)
    assert random.random() == expected


def test_another_seed_draws_another_random_regular_graph():
    W = [make_topology(f"random-regular:seed={seed}", 32).matrix(0) for seed in range(2)]
    assert not np.array_equal(*W)


def test_random_regular_has_degree_four_where_that_is_possible():
    assert [len(neighbours("random-regular", size)[0]) for size in (1, 2, 3, 5, 6, 7)] == [0, 1, 2, 4, 4, 4]


def test_hypercube_neighbours_differ_in_one_digit():
    assert make_topology("hypercube", 8).peers(5, 0).send == (0b001, 0b100, 0b111)


@pytest.mark.parametrize("size", [3, 6, 100])
def test_hypercube_says_which_sizes_are_allowed(size):
    with pytest.raises(ConfigError, match=rf'hypercube .* got {size}; use \d+ or \d+ workers, or "exponential"'):
        make_topology("hypercube", size)


@pytest.mark.parametrize("name", SPECS)
def test_one_worker_is_alone_and_two_are_a_pair(name):
    assert make_topology(name, 1).matrix(0).tolist() == [[1.0]]
    assert make_topology(name, 1).peers(0, 0).receive == {}
    assert make_topology(name, 2).matrix(0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
