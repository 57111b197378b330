"""What users may pass as a topology, and the sentence they read where they may not."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch

from decent_opt.errors import ConfigError
from decent_opt.topology import CyclicTopology, make_topology, metropolis_hastings, spectral_gap

PAIR = np.full((2, 2), 0.5)
LAZY_SHIFT = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]


@pytest.mark.parametrize(
    "spec",
    [
        LAZY_SHIFT,
        np.array(LAZY_SHIFT),
        torch.tensor(LAZY_SHIFT, dtype=torch.float16),  # halves are exact in any floating type
        torch.nn.Parameter(torch.tensor(LAZY_SHIFT)),
    ],
    ids=["list", "array", "tensor", "parameter"],
)
def test_a_matrix_may_be_a_list_an_array_or_a_tensor(spec):
    topology = make_topology(spec, 3)
    assert topology.matrix(0).tolist() == LAZY_SHIFT
    assert topology.peers(0, 5).receive == {1: 0.5}
    assert topology.peers(0, 5).send == (2,)


def test_any_graph_of_networkx_through_its_weights():
    torus = make_topology(metropolis_hastings(nx.grid_2d_graph(4, 4, periodic=True)), 16)
    assert spectral_gap(torus) == pytest.approx(0.4)


def test_a_schedule_is_a_stack_of_matrices():
    across = np.kron(PAIR, np.eye(2))
    within = np.kron(np.eye(2), PAIR)
    topology = make_topology([across, within], 4)  # each round alone is not connected
    assert topology.period == 2
    assert topology.peers(0, 0).send == (2,)
    assert topology.peers(0, 1).send == (1,)
    assert spectral_gap(topology) == 1.0


def test_a_schedule_may_mix_graphs_names_and_matrices():
    pairs = nx.Graph([(0, 1), (2, 3)])  # alone it would not be connected
    lazy = torch.full((4, 4), 0.25, dtype=torch.bfloat16)
    topology = make_topology([pairs, "one-peer-hypercube", lazy, np.eye(4), np.eye(4).tolist()], 4)
    assert topology.period == 6
    assert [topology.peers(0, r).send for r in range(6)] == [(1,), (1,), (2,), (1, 2, 3), (), ()]


@pytest.mark.parametrize(
    "schedule, sentence",
    [
        ([np.eye(4), nx.path_graph(3)], "W of round 1 is for 3 workers and W of round 0 for 4"),
        ([nx.Graph([(0, 1), (2, 3)]), np.eye(4)], "nothing ever passes between worker 0 and worker 2"),
        (["ring", "rnig"], "unknown name 'rnig'"),
        (["ring", 7], "cannot read 7 as a matrix"),
        ([["ring"]], "cannot read [['ring']] as a matrix"),
        ([], "must be a square matrix (n, n), got shape (0,)"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_in_words(schedule, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_topology(schedule, 4)


def test_an_object_of_the_user_is_read_over_its_period():
    asked = []
    matrices = [np.array(LAZY_SHIFT), np.array(LAZY_SHIFT).T]
    mine = SimpleNamespace(name="mine", size=3, period=2, matrix=lambda r: (asked.append(r), matrices[r])[1])
    topology = make_topology(mine, 3)
    assert asked == [0, 1]
    assert (topology.name, topology.size, topology.period) == ("mine", 3, 2)
    np.testing.assert_array_equal(topology.matrix(3), matrices[1])


def test_a_topology_is_returned_as_it_is():
    topology = make_topology("ring", 4)
    assert make_topology(topology, 4) is topology


def test_the_matrix_is_a_copy_that_nobody_can_change():
    mine = np.array(LAZY_SHIFT)
    W = make_topology(mine, 3).matrix(0)
    mine[0, 0] = 7.0
    assert W[0, 0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        W[0, 0] = 7.0


NAN, SWAP = float("nan"), np.array([[0.0, 1.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    "spec, size, sentence",
    [
        ("rnig", 4, "unknown name 'rnig'; allowed are ring, complete, star"),
        (None, 4, "cannot read None as a matrix; allowed are ring"),
        ([[1.0], [0.5, 0.5]], 2, "cannot read [[1.0], [0.5, 0.5]] as a matrix"),
        ([0.5, 0.5], 2, "W must be a square matrix (n, n), got shape (2,)"),
        (np.ones((2, 3)) / 3, 2, "W must be a square matrix (n, n), got shape (2, 3)"),
        (np.empty((0, 2, 2)), 2, "got no matrices"),
        (PAIR, 3, "'custom' is for 2 workers, but there are 3"),
        (make_topology("ring", 4), 8, "'ring' is for 4 workers, but there are 8"),
        ([[1.0, NAN], [0.0, 1.0]], 2, "W[0, 1] is nan; every weight must be finite"),
        ([[1.5, -0.5], [-0.5, 1.5]], 2, "W[0, 1] is -0.5; every weight must be at least 0"),
        ([[0.5, 0.5], [0.5, 0.4]], 2, "row 1 of W sums to 0.9; every row and every column must sum to 1"),
        ([[0.5, 0.5], [0.3, 0.7]], 2, "column 0 of W sums to 0.8"),
        (
            torch.full((3, 3), 1 / 3),
            3,
            "sums to 1.00000003; every row and every column must sum to 1 within 1e-08",
        ),
        ([PAIR, [[0.5, 0.5], [0.3, 0.7]]], 2, "column 0 of W of round 1 sums to 0.8"),
        (np.eye(2), 2, "nothing ever passes between worker 0 and worker 1 (1 of 2 workers are cut off)"),
        (np.kron(PAIR, np.eye(2)), 4, "between worker 0 and worker 1 (2 of 4 workers are cut off)"),
        (SWAP, 2, "without ever blending all of them; give every worker a positive weight for itself"),
        (np.roll(np.eye(5), 1, axis=0), 5, "without ever blending all of them"),
        # connected over the period, but half of the workers always hold what the other half held before
        (np.kron(SWAP, PAIR), 4, "without ever blending all of them"),
        (SimpleNamespace(name="mine", size=2, period=0, matrix=None), 2, "the period must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_in_words(spec, size, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_topology(spec, size)


def test_workers_without_self_weight_are_fine_where_they_blend():
    # hops 1 and 2 on five workers: nobody keeps a share, yet powers of W fill up
    P = np.roll(np.eye(5), 1, axis=0)
    assert make_topology((P + P @ P) / 2, 5).peers(0, 0).self_weight == 0.0


def test_rounds_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match="W of round 1 is for 1 workers and W of round 0 for 2"):
        CyclicTopology([PAIR, np.eye(1)], "mixed")


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_size_must_be_a_positive_whole_number(size):
    with pytest.raises(ConfigError, match="size: the number of workers must be a whole number from 1 on"):
        make_topology("ring", size)


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_must_be_a_worker(rank):
    with pytest.raises(ConfigError, match=rf"rank: {rank} is no worker .* allowed are 0 to 3"):
        make_topology("ring", 4).peers(rank, 0)


def test_importing_the_topologies_does_not_import_networkx():
    code = "import sys, decent_opt.topology; sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
