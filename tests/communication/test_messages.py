"""What arrives is checked: length, round, sender, format; and the transports refuse what cannot work."""

from __future__ import annotations

import pytest
import torch

from decent_opt import ConfigError, PeerLost
from decent_opt.communication import LoopbackTransport, LoopbackWorld, connect, ring_all_reduce_bytes
from decent_opt.gossip.message import HEADER_BYTES, check, seal, stamp
from decent_opt.testing import RankPool, run_ranks


def stamped(payload: int = 8, round: int = 3, sender: int = 1) -> torch.Tensor:
    message = torch.zeros(HEADER_BYTES + payload, dtype=torch.uint8)
    stamp(message, round, sender)
    message[HEADER_BYTES:] = torch.arange(payload)
    seal(message)
    return message


def test_the_expected_message_passes() -> None:
    check(stamped(), 3, 1, me=0)


def test_every_damage_is_named() -> None:
    with pytest.raises(PeerLost, match="rank 0: what came from rank 1 in round 4 belongs to round 3"):
        check(stamped(), 4, 1, me=0)
    with pytest.raises(PeerLost, match="was sent by rank 1") as error:
        check(stamped(), 3, 2, me=0)
    assert (error.value.rank, error.value.round) == (2, 3)
    longer = torch.cat([stamped(), torch.zeros(4, dtype=torch.uint8)])
    with pytest.raises(PeerLost, match="carries 8 bytes, expected 12"):
        check(longer, 3, 1, me=0)
    broken = stamped()
    broken[0] += 1
    with pytest.raises(PeerLost, match="is not a decent-opt message"):
        check(broken, 3, 1, me=0)


@pytest.mark.parametrize("length", [1, 7, 8, 29])
def test_any_flipped_bit_is_noticed(length: int) -> None:
    for place in range(length):
        for bit in range(8):
            message = stamped(length)
            message[HEADER_BYTES + place] ^= 1 << bit
            with pytest.raises(PeerLost, match="rank 1 in round 3 was damaged on its way"):
                check(message, 3, 1, me=0)


def different_lengths(rank: int) -> str:
    """Rank 0 sends fewer bytes than rank 1 expects; the backends fill the buffer in part and say nothing."""
    transport = connect(timeout=3.0)
    out = stamped(8 if rank == 0 else 40, round=0, sender=rank)
    into = torch.zeros(HEADER_BYTES + 40, dtype=torch.uint8)
    try:
        transport.post({1 - rank: out}, {1 - rank: into}, 0).wait()
        check(into, 0, 1 - rank, rank)
    except PeerLost as error:
        return str(error)
    return "ok"


@pytest.mark.parametrize("backend", ["gloo", "loopback"])
def test_a_short_message_is_noticed(ranks: RankPool, backend: str) -> None:
    results = ranks.run(different_lengths, 2) if backend == "gloo" else run_ranks(different_lengths, 2, "loopback")
    assert results[0] == "ok"
    assert "what came from rank 0" in results[1] or "the message of rank 0 in round 0 has 48 bytes" in results[1]


def test_a_silent_loopback_peer_raises_in_time() -> None:
    transport = LoopbackTransport(LoopbackWorld(2, timeout=0.1), 0)
    with pytest.raises(PeerLost, match="rank 0: no message from rank 1 in round 5"):
        transport.post({}, {1: torch.zeros(3, dtype=torch.uint8)}, 5).wait()


def test_several_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE: the launcher started 4 processes"):
        connect()


def test_ring_all_reduce_bytes() -> None:
    assert ring_all_reduce_bytes(1000, 4) == 1500
    assert ring_all_reduce_bytes(1000, 1) == 0
