"""A round holds at most degree + 2 buckets beyond the parameters, whatever the size of the model."""

from __future__ import annotations

import resource

import pytest
import torch

from decent_opt.communication import connect
from decent_opt.gossip import PeriodicGossip
from decent_opt.testing import RankPool
from decent_opt.topology import make_topology

MODEL_MB, BUCKET_MB = 240, 8


def peak_growth_mb(rank: int, name: str) -> float:
    """By how much a round raises this process's peak of resident memory."""
    transport = connect(timeout=60)
    gossip = PeriodicGossip(transport, make_topology(name, transport.size), BUCKET_MB * 10**6)
    small = [torch.ones(1000)]
    gossip.start(small, 0)  # connections and library buffers are there from now on
    gossip.finish()
    model = [torch.ones(MODEL_MB * 10**6 // 4 // 3) for _ in range(3)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gossip.start(model, 1)
    gossip.finish()
    transport.close()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


@pytest.mark.parametrize(("name", "degree"), [("ring", 2), ("complete", 3)])
def test_a_round_holds_degree_plus_two_buckets(name: str, degree: int) -> None:
    with RankPool(timeout=100) as pool:  # fresh processes: a peak is for a process's whole life
        growth = max(pool.run(peak_growth_mb, 4, (name,)))
    # 4 MB for gloo's own buffers and the allocator's rounding; a copy of the model would be 240.
    assert growth <= (degree + 2) * BUCKET_MB + 4
