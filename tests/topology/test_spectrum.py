"""Spectral gap and beta against closed forms and against a table computed by other code."""

from __future__ import annotations

from math import ceil, cos, log, log2, pi

import numpy as np
import pytest

from decent_opt.topology import beta, consensus_factor, make_topology, rounds_to_reduce, spectral_gap

# name: {n: (gap, beta, degree)}, printed to 5 and 3 digits
TABLE = {
    "ring": {
        8: (0.19526, 1.333, 2),
        16: (0.05075, 1.333, 2),
        32: (0.01281, 1.333, 2),
        64: (0.00321, 1.333, 2),
        100: (0.00132, 1.333, 2),
    },
    "path": {
        8: (0.05075, 1.283, 2),
        16: (0.01281, 1.321, 2),
        32: (0.00321, 1.330, 2),
        64: (0.00080, 1.333, 2),
        100: (0.00033, 1.333, 2),
    },
    "torus": {  # 2x4, 4x4, 4x8, 8x8, 10x10
        8: (0.50000, 1.500, 3),
        16: (0.40000, 1.600, 4),
        32: (0.11716, 1.600, 4),
        64: (0.11716, 1.600, 4),
        100: (0.07639, 1.600, 4),
    },
    "hypercube": {
        8: (0.50000, 1.500, 3),
        16: (0.40000, 1.600, 4),
        32: (0.33333, 1.667, 5),
        64: (0.28571, 1.714, 6),
    },
    "star": {
        8: (0.12500, 1.000, 1),
        16: (0.06250, 1.000, 1),
        32: (0.03125, 1.000, 1),
        64: (0.01562, 1.000, 1),
        100: (0.01000, 1.000, 1),
    },
    "complete": {
        8: (1.0, 1.000, 7),
        16: (1.0, 1.000, 15),
        32: (1.0, 1.000, 31),
        64: (1.0, 1.000, 63),
        100: (1.0, 1.000, 99),
    },
    "exponential": {
        8: (0.50000, 1.179, 3),
        16: (0.40000, 1.242, 4),
        32: (0.33333, 1.276, 5),
        64: (0.28571, 1.315, 6),
        100: (0.25000, 1.249, 7),
    },
}


@pytest.mark.parametrize("name, size", [(name, size) for name, row in TABLE.items() for size in row])
def test_table(name, size):
    gap, expected_beta, degree = TABLE[name][size]
    topology = make_topology(name, size)
    assert spectral_gap(topology) == pytest.approx(gap, abs=6e-6)  # half a unit of the last printed digit
    assert beta(topology) == pytest.approx(expected_beta, abs=6e-4)
    assert len(topology.peers(size // 2, 0).send) == degree  # at either end a path has one neighbour only


CLOSED_FORMS = {
    "ring": lambda n: 2 / 3 * (1 - cos(2 * pi / n)),
    "path": lambda n: 2 / 3 * (1 - cos(pi / n)),
    "hypercube": lambda n: 2 / (1 + log2(n)),
    "star": lambda n: 1 / n,
    "complete": lambda n: 1.0,
    "exponential": lambda n: 2 / (1 + ceil(log2(n))),  # even n
}


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name, size):
    assert spectral_gap(make_topology(name, size)) == pytest.approx(CLOSED_FORMS[name](size), abs=1e-12)


@pytest.mark.parametrize("size", [6, 10, 12, 22, 100])
def test_closed_form_of_the_static_exponential_graph_for_even_sizes(size):
    gap = spectral_gap(make_topology("exponential", size))
    assert gap == pytest.approx(CLOSED_FORMS["exponential"](size), abs=1e-12)


def test_a_schedule_is_judged_by_its_period():
    assert spectral_gap(make_topology("one-peer-exponential", 16)) == 1.0
    # seven rounds leave 0.192 of the distance: 0.790 a round
    assert consensus_factor(make_topology("one-peer-exponential", 100)) == pytest.approx(0.790, abs=5e-4)


def test_an_exact_period_with_inexact_weights_has_gap_one():
    # Three rounds of the three digits of 0 ... 26 in base 3: weights 1/3 are not exact in binary.
    thirds = np.full((3, 3), 1 / 3)
    schedule = [np.kron(np.kron(np.eye(3**i), thirds), np.eye(3 ** (2 - i))) for i in range(3)]
    assert spectral_gap(make_topology(schedule, 27)) == 1.0


def test_beta_is_that_of_the_worst_round():
    topology = make_topology("one-peer-exponential", 8)
    assert beta(topology) == pytest.approx(1.0)
    single = [np.linalg.norm(np.eye(8) - topology.matrix(r), 2) for r in range(3)]
    assert beta(topology) == max(single)


@pytest.mark.parametrize("spec", ["ring", "path", "star", "exponential", "random-regular", "hierarchical:group=4"])
@pytest.mark.parametrize("factor", [2.0, 100.0])
def test_rounds_of_a_fixed_graph_follow_from_its_gap_where_it_is_normal(spec, factor):
    topology = make_topology(spec, 20)
    assert rounds_to_reduce(topology, factor) == ceil(log(factor) / -log(consensus_factor(topology)))


@pytest.mark.parametrize(
    "spec, size, rounds",
    [("complete", 9, 1), ("one-peer-exponential", 16, 4), ("one-peer-hypercube", 32, 5), ("base:k=1", 100, 11)],
)
def test_rounds_of_an_exact_schedule_are_its_period(spec, size, rounds):
    assert rounds_to_reduce(make_topology(spec, size)) == rounds


@pytest.mark.parametrize("spec, size", [("one-peer-exponential", 23), ("hierarchical:group=2,outer=base:k=1", 14)])
def test_rounds_are_those_that_multiplying_them_one_by_one_gives(spec, size):
    topology = make_topology(spec, size)
    product, rounds = np.eye(size), 0
    while np.linalg.norm(product - 1 / size, 2) > 0.01:
        product, rounds = topology.matrix(rounds) @ product, rounds + 1
    assert rounds_to_reduce(topology) == rounds


def test_one_worker_never_disagrees():
    assert rounds_to_reduce(make_topology("ring", 1)) == 0
