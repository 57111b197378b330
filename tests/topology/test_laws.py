"""What holds for every topology: W is doubly stochastic, and peers are exactly what W says."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_opt.errors import ConfigError
from decent_opt.topology import (
    NAMES,
    Topology,
    consensus_factor,
    make_topology,
    metropolis_hastings,
    permute,
    spectral_gap,
    uniform_weights,
)

POWERS_OF_TWO = {"hypercube", "one-peer-hypercube"}


@st.composite
def specs(draw: st.DrawFn) -> tuple[str, int]:
    """A name with options and a number of workers that it takes."""
    name = draw(st.sampled_from(NAMES))
    size = 2 ** draw(st.integers(0, 5)) if name in POWERS_OF_TWO else draw(st.integers(1, 40))
    if name == "torus":
        rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        return f"torus:{rows}x{columns}", rows * columns
    if name == "base":
        return f"base:k={draw(st.integers(1, 5))}", size
    if name == "random-regular":
        degree = draw(st.integers(2, 5))
        size = degree + 1 + draw(st.integers(0, 15))
        return f"random-regular:degree={degree},seed={draw(st.integers(0, 99))}", size + size * degree % 2
    if name == "hierarchical":
        group, hosts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
        inner, outer = (draw(st.sampled_from(["ring", "complete", "star", "exponential", "base"])) for _ in range(2))
        links = draw(st.integers(1, group))
        return f"hierarchical:group={group},links={links},inner={inner},outer={outer}", group * hosts
    if name in ("ring", "path", "star", "hypercube"):
        name += draw(st.sampled_from(["", ":weights=uniform", ":weights=metropolis"]))
    return name, size


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    kind = draw(st.sampled_from(["named", "named", "graph", "permutations", "schedule"]))
    if kind == "named":
        return make_topology(*draw(specs()))
    size = draw(st.integers(1, 40))
    if kind == "schedule":  # whatever the others are, the ring connects them
        graph = nx.empty_graph(size)
        workers = st.integers(0, size - 1)
        graph.add_edges_from(draw(st.lists(st.tuples(workers, workers), max_size=size)))
        return make_topology(draw(st.permutations(["ring", graph, np.eye(size), "exponential"])), size)
    if kind == "graph":  # a tree makes it connected, anything may be added
        graph = nx.random_labeled_tree(size, seed=draw(st.integers(0, 2**16)))
        workers = st.integers(0, size - 1)
        graph.add_edges_from(draw(st.lists(st.tuples(workers, workers), max_size=2 * size)))
        return make_topology(draw(st.sampled_from([metropolis_hastings, uniform_weights, lambda g: g]))(graph), size)
    if kind == "permutations":  # every doubly stochastic matrix is a mean of permutations (Birkhoff)
        orders = draw(st.lists(st.permutations(range(size)), min_size=1, max_size=4))
        shares = [np.eye(size), np.roll(np.eye(size), 1, axis=0), *(np.eye(size)[order] for order in orders)]
        return make_topology(np.mean(shares, axis=0), size)
    raise AssertionError(kind)


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


@given(topologies(), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_gap_does_not_depend_on_who_is_where(topology, generator):
    order = generator.sample(range(topology.size), topology.size)
    moved = permute(topology, order)
    # a rounding error of 1e-16 after a period of 11 rounds: its 11th root may differ by percents, its power may not
    shrunk = [consensus_factor(t) ** t.period for t in (topology, moved)]
    assert shrunk[0] == pytest.approx(shrunk[1], abs=1e-12)


@given(specs())
@settings(max_examples=50)
def test_a_name_means_the_same_on_every_worker(spec):
    one, other = make_topology(*spec), make_topology(*spec)
    assert one.name == spec[0]
    assert one.period == other.period
    for r in range(one.period):
        assert one.matrix(r).tobytes() == other.matrix(r).tobytes()


PIECES = st.sampled_from(
    [
        ":",
        ",",
        "=",
        "x",
        "1",
        "2",
        "4",
        "2x4",
        "-1",
        "k",
        "degree",
        "seed",
        "group",
        "inner",
        "outer",
        "weights",
        *NAMES,
    ]
)


@given(st.text(max_size=20) | st.lists(PIECES, max_size=8).map("".join), st.integers(1, 12))
@settings(max_examples=200)
def test_any_text_is_a_topology_or_a_sentence(text, size):
    sentence, topology = "", None
    try:
        topology = make_topology(text, size)
    except ConfigError as error:
        sentence = str(error)
    assert topology.size == size if topology else sentence.startswith("topology: ")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hierarchical"] + ["hierarchical:group=4"])
def test_the_schedule_repeats_and_remembers(name):
    topology = make_topology(name, 8)
    assert topology.peers(3, topology.period) is topology.peers(3, 0)
    assert topology.matrix(topology.period + 1) is topology.matrix(1)
