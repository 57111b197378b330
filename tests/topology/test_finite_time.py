"""Schedules that end in the exact average, for every size, in the known number of rounds."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from decent_opt.errors import ConfigError
from decent_opt.topology import make_topology, rounds_to_reduce, spectral_gap
from decent_opt.topology.finite_time import base, hyper_hypercube, simple_base

KNOWN_ROUNDS = {1: (13, 11), 2: (9, 8), 3: (7, 6), 4: (3, 3)}  # n = 100: simple Base-(k+1), Base-(k+1)


def product(rounds: list[np.ndarray]) -> np.ndarray:
    return reduce(lambda product, W: W @ product, rounds)


@pytest.mark.parametrize("k", KNOWN_ROUNDS)
def test_the_known_number_of_rounds_for_100_workers(k):
    assert (len(simple_base(100, k)), len(base(100, k))) == KNOWN_ROUNDS[k]
    assert make_topology(f"base:k={k}", 100).period == KNOWN_ROUNDS[k][1]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [simple_base, base])
def test_base_graphs_are_exact_for_every_size(make, k):
    for size in range(1, 101):
        rounds = make(size, k)
        np.testing.assert_allclose(product(rounds), 1 / size, atol=1e-14)  # the promise is 1e-12
        for W in rounds:
            np.testing.assert_array_equal(W, W.T)
            np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-14)
            assert W.min() >= 0
            assert W.diagonal().min() > 0  # everyone keeps a share
            assert (np.count_nonzero(W, axis=1) - 1).max() <= k


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_graphs_need_no_more_rounds_than_the_paper_says(k):
    for size in range(2, 101):
        assert len(base(size, k)) <= len(simple_base(size, k)) <= 2 * np.log(size) / np.log(k + 1) + 2


@pytest.mark.parametrize("size, k, rounds", [(8, 1, 3), (64, 1, 6), (8, 3, 2), (16, 3, 2), (32, 3, 3), (64, 3, 3)])
def test_hyper_hypercube_takes_as_many_rounds_as_the_size_has_factors(size, k, rounds):
    schedule = hyper_hypercube(size, k)
    assert len(schedule) == rounds
    np.testing.assert_allclose(product(schedule), 1 / size, atol=1e-16)


def test_hyper_hypercube_averages_digit_by_digit():
    triples, pairs = hyper_hypercube(6, 2)
    np.testing.assert_allclose(triples[4], [0, 0, 0, 1 / 3, 1 / 3, 1 / 3])
    np.testing.assert_allclose(pairs[4], [0, 1 / 2, 0, 0, 1 / 2, 0])


@pytest.mark.parametrize("size, k", [(5, 3), (12, 1), (100, 3)])
def test_hyper_hypercube_needs_small_prime_factors(size, k):
    assert hyper_hypercube(size, k) is None


def test_six_workers_with_one_neighbour():
    # simple: 6 = 4 + 2; two rounds inside {0 1 2 3} and {4 5}, 4 and 5 meet 0 and 1, two rounds inside {0 1 2 3} again
    simple = make_topology(simple_base(6, 1), 6)
    assert simple.period == 5
    assert [simple.peers(rank, 2).send for rank in range(6)] == [(4,), (5,), (), (), (0,), (1,)]
    assert simple.peers(4, 2).receive == {0: pytest.approx(2 / 3)}
    # Base-2: 6 = 2 x 3; three rounds for three workers, one in pairs
    assert make_topology("base", 6).period == 4


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_one_peer_hypercube_is_exact_and_symmetric(size):
    topology = make_topology("one-peer-hypercube", size)
    rounds = [topology.matrix(r) for r in range(topology.period)]
    np.testing.assert_array_equal(product(rounds), np.full((size, size), 1 / size))  # bit for bit
    for r, W in enumerate(rounds if size > 1 else []):
        np.testing.assert_array_equal(W, W.T)
        assert [topology.peers(k, r).send for k in range(size)] == [(k ^ 2**r,) for k in range(size)]


def test_one_peer_hypercube_says_which_sizes_are_allowed():
    with pytest.raises(ConfigError, match="one-peer-hypercube needs a power of two workers, got 12; use 8 or 16"):
        make_topology("one-peer-hypercube", 12)


@pytest.mark.parametrize("spec", ["base:k=1", "base:k=2", "base:k=3", "base"])
@pytest.mark.parametrize("size", [7, 25, 60])
def test_a_period_of_base_is_an_exact_average(spec, size):
    topology = make_topology(spec, size)
    assert spectral_gap(topology) == 1.0
    assert rounds_to_reduce(topology, 1e9) <= topology.period
