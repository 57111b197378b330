"""Hosts of workers: the formula, the limits, where the messages go; and who takes which place."""

from __future__ import annotations

import numpy as np
import pytest

from decent_opt.errors import ConfigError
from decent_opt.topology import make_topology, permute, spectral_gap


def crossing(topology, group: int) -> list[int]:
    """Messages of a worker to other hosts, in all rounds of a period."""
    sends = [
        (rank, to)
        for r in range(topology.period)
        for rank in range(topology.size)
        for to in topology.peers(rank, r).send
    ]
    return [sum(k == rank and to // group != rank // group for k, to in sends) for rank in range(topology.size)]


def test_the_weights_on_two_hosts_of_two():
    W = make_topology("hierarchical:group=2", 4).matrix(0)
    expected = [[1 / 2, 1 / 4, 1 / 4, 0], [1 / 4, 3 / 4, 0, 0], [1 / 4, 0, 1 / 2, 1 / 4], [0, 0, 1 / 4, 3 / 4]]
    np.testing.assert_array_equal(W, expected)


def test_with_as_many_links_as_workers_it_is_the_mean_of_the_two_levels():
    W = make_topology("hierarchical:group=3,links=3,inner=path,outer=ring", 12).matrix(0)
    within, between = make_topology("path", 3).matrix(0), make_topology("ring", 4).matrix(0)
    np.testing.assert_allclose(W, (np.kron(np.eye(4), within) + np.kron(between, np.eye(3))) / 2, atol=1e-16)


def test_most_edges_stay_inside_a_host_and_only_speakers_send_out():
    topology = make_topology("hierarchical:group=8,links=2", 32)
    out = crossing(topology, 8)
    assert out == [2, 2, 0, 0, 0, 0, 0, 0] * 4
    assert sum(out) < 0.1 * sum(len(topology.peers(rank, 0).send) for rank in range(32))


def test_it_mixes_faster_than_a_ring_that_sends_as_much_between_hosts():
    ring, hierarchy = make_topology("ring", 64), make_topology("hierarchical:group=8", 64)
    assert sum(crossing(ring, 8)) == sum(crossing(hierarchy, 8)) == 16
    assert spectral_gap(hierarchy) > 3 * spectral_gap(ring)


def test_one_host_is_the_inner_graph_and_one_worker_per_host_the_outer():
    spec = "hierarchical:inner=star,outer=path,group="
    np.testing.assert_array_equal(make_topology(f"{spec}6", 6).matrix(0), make_topology("star", 6).matrix(0))
    np.testing.assert_array_equal(make_topology(f"{spec}1", 6).matrix(0), make_topology("path", 6).matrix(0))


def test_schedules_inside_and_outside_run_side_by_side():
    # 2 rounds inside the hosts, 3 between them
    topology = make_topology("hierarchical:group=4,inner=one-peer-hypercube,outer=base:k=1", 12)
    inner, outer = make_topology("one-peer-hypercube", 4), make_topology("base:k=1", 3)
    assert topology.period == np.lcm(inner.period, outer.period)
    for r in range(topology.period):
        W = topology.matrix(r)
        np.testing.assert_allclose(2 * W[1:4, 1:4] - np.eye(3), inner.matrix(r)[1:, 1:], atol=1e-15)
        np.testing.assert_allclose(2 * W[::4, ::4], outer.matrix(r) + np.eye(3) / 2, atol=1e-15)


def test_the_reason_names_the_level_that_does_not_fit():
    with pytest.raises(ConfigError, match="outer=hypercube of hierarchical: hypercube needs a power of two"):
        make_topology("hierarchical:group=4,outer=hypercube", 12)


def test_permute_puts_worker_order_i_in_place_i():
    # two hosts, ranks dealt out in turns: 0 2 4 on the first, 1 3 5 on the second
    dealt = permute(make_topology("ring", 6), [0, 2, 4, 1, 3, 5])
    assert dealt.peers(2, 0).send == (0, 4)
    assert dealt.peers(4, 0).send == (1, 2)
    host = [rank % 2 for rank in range(6)]
    across = sum(host[k] != host[to] for k in range(6) for to in dealt.peers(k, 0).send)
    assert across == 4  # two links, both ways


def test_permute_keeps_the_gap_and_the_direction_of_every_round():
    topology = make_topology("one-peer-exponential", 6)
    order = [3, 1, 5, 0, 2, 4]
    moved = permute(topology, order)
    assert spectral_gap(moved) == pytest.approx(spectral_gap(topology))
    for r in range(topology.period):
        for place in range(6):
            assert moved.peers(order[place], r).send == tuple(sorted(order[i] for i in topology.peers(place, r).send))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3], []])
def test_permute_wants_every_rank_once(order):
    with pytest.raises(ConfigError, match="order: must name each of the ranks 0 to 2 once"):
        permute(make_topology("ring", 3), order)
