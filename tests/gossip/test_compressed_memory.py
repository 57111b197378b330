"""A compressed round holds degree + 1 encoded models and 2 buckets beyond the state, whatever the degree."""

from __future__ import annotations

import resource

import pytest
import torch

from decent_opt.communication import connect
from decent_opt.compression import Layout, make_compressor
from decent_opt.gossip import CompressedGossip, Mixable
from decent_opt.testing import RankPool
from decent_opt.topology import make_topology

BUCKET_MB = 25  # the default
ROWS, WIDTH, MATRICES = 1250, 1000, 20  # 25M parameters, 100 MB


def peak_growth_mb(rank: int, name: str, spec: str) -> float:
    """By how much two rounds raise this process's peak of resident memory beyond x, xhat and z."""
    transport, compressor = connect(timeout=60), make_compressor(spec)

    def mixables(count: int, shape: tuple[int, ...]) -> list[Mixable]:
        return [Mixable(torch.ones(shape), torch.zeros(shape), torch.zeros(shape), compressor) for _ in range(count)]

    gossip = CompressedGossip(transport, make_topology(name, transport.size), BUCKET_MB * 10**6)
    small, model = gossip.cut(mixables(1, (100, 50))), gossip.cut(mixables(MATRICES, (ROWS, WIDTH)))
    gossip.send(small, 0)  # connections and library buffers are there from now on
    gossip.absorb()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round in (1, 2, 3):
        gossip.send(model, round)
        gossip.absorb()
        gossip.mix(model, 0.4)
    transport.close()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


@pytest.mark.parametrize("spec", ["sign", "bf16"])
@pytest.mark.parametrize(("name", "workers"), [("ring", 3), ("complete", 8)])
def test_a_round_holds_the_messages_and_two_buckets(name: str, workers: int, spec: str) -> None:
    with RankPool(timeout=100) as pool:  # fresh processes: a peak is for a process's whole life
        growth = max(pool.run(peak_growth_mb, workers, (name, spec)))
    encoded = make_compressor(spec).nbytes(Layout.of((ROWS * MATRICES, WIDTH)), torch.float32) / 1e6
    # One bucket is room for what is being encoded or decoded; the other is left for what libraries take.
    assert growth <= workers * encoded + 2 * BUCKET_MB
