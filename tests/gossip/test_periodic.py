"""One round on awkward tensors: any dtype, shape and memory order, cut anywhere; bytes are the buffers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_opt.communication import connect
from decent_opt.gossip import PeriodicGossip, average_, broadcast_
from decent_opt.gossip.message import HEADER_BYTES
from decent_opt.testing import RankPool, run_ranks
from decent_opt.topology import make_topology


def awkward(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        random(7, 5),
        random(),
        random(0, 3),
        random(4, 6).t(),
        random(2, 3, 4, 4).to(memory_format=torch.channels_last),
        random(8, 8)[::2, 1::3],
        random(11, dtype=torch.float64),
        random(9, dtype=torch.bfloat16),
        torch.complex(random(5), random(5)),
    ]


def mix(rank: int, name: str, rounds: int, limit: int) -> tuple[list[Tensor], int, int]:
    transport = connect(timeout=30)
    gossip = PeriodicGossip(transport, make_topology(name, transport.size), limit)
    tensors, sent, received = awkward(rank), 0, 0
    pointers = [t.data_ptr() for t in tensors]
    for round in range(rounds):
        gossip.start(tensors, round)
        mixing = gossip.finish()
        sent += sum(mixing.sent.values())
        received += sum(mixing.received.values())
    assert pointers == [t.data_ptr() for t in tensors]
    transport.close()
    return tensors, sent, received


@pytest.mark.parametrize("limit", [4, 50, 10**6])
@pytest.mark.parametrize("name", ["ring", "one-peer-exponential", "star"])
def test_a_round_is_w_times_x(ranks: RankPool, name: str, limit: int) -> None:
    n, rounds = 4, 3
    product = np.eye(n)
    for round in range(rounds):
        product = make_topology(name, n).matrix(round) @ product
    starts = [awkward(rank) for rank in range(n)]
    for results in (ranks.run(mix, n, (name, rounds, limit)), run_ranks(mix, n, "loopback", (name, rounds, limit))):
        for k, (tensors, _, _) in enumerate(results):
            for place, tensor in enumerate(tensors):
                wide = torch.complex128 if tensor.is_complex() else torch.float64
                expected = sum(product[k, j] * starts[j][place].to(wide) for j in range(n))
                # bfloat16 is rounded to 8 bits after every round, the others once per round to 24 bits or more
                tolerance = 3e-2 if tensor.dtype == torch.bfloat16 else 1e-6
                assert torch.allclose(tensor.to(wide), torch.as_tensor(expected), atol=tolerance)


def test_bytes_are_payload_and_headers(ranks: RankPool) -> None:
    payload = sum(t.numel() * t.element_size() for t in awkward(0))
    kinds = 3  # float32 (with the complex numbers), float64, bfloat16: one bucket each
    for _, sent, received in ranks.run(mix, 4, ("ring", 1, 10**6)):
        assert sent == received == 2 * (payload + kinds * HEADER_BYTES)


def exact(rank: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    transport = connect(timeout=30)
    averaged, copied = awkward(rank), awkward(rank)
    count = torch.tensor([rank, 5])
    average_(transport, averaged, 60)
    broadcast_(transport, [*copied, count], 60)
    transport.close()
    return averaged, copied, count


@pytest.mark.parametrize("backend", ["gloo", "loopback"])
def test_exact_average_and_broadcast(ranks: RankPool, backend: str) -> None:
    results = ranks.run(exact, 3) if backend == "gloo" else run_ranks(exact, 3, "loopback")
    starts = [awkward(rank) for rank in range(3)]
    for averaged, copied, count in results:
        assert count.tolist() == [0, 5]
        for place, tensor in enumerate(averaged):
            assert torch.equal(copied[place], starts[0][place])
            assert torch.equal(tensor, results[0][0][place])
            mean = sum(s[place] for s in starts) / 3
            assert torch.allclose(tensor, mean, atol=2e-2 if tensor.dtype == torch.bfloat16 else 1e-6)


def spread(rank: int) -> tuple[float, float]:
    transport = connect(timeout=30)
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
    mean = x.clone()
    transport.average_([mean])
    exact_distance = float((x - mean).norm())
    gossip = PeriodicGossip(transport, make_topology("ring", transport.size), 10**6)
    gossip.start([x], 0)
    return float(gossip.finish().spread), exact_distance


def test_the_estimate_of_the_spread_is_right_for_independent_workers() -> None:
    for estimate, exact_distance in run_ranks(spread, 8, "loopback"):
        # The deviation from a mean of n = 8 is sqrt(7/8) of the workers' own; 20000 coordinates leave 1 % of noise.
        assert estimate * (7 / 8) ** 0.5 == pytest.approx(exact_distance, rel=0.05)
