"""One bucket on its way: encode it, post it to the neighbours, wait for theirs, sum up.

    q = x, or x rounded to a narrower message dtype;      mixed = sum_j w_kj q_j      (float32 at least)

Terms are summed in the order of the ranks, the own one included, so that workers with the same weights get the
same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from decent_opt.communication import Traffic, Transport
from decent_opt.gossip.buckets import Bucket
from decent_opt.gossip.finite import indices, not_finite
from decent_opt.gossip.message import HEADER_BYTES, check, flag_empty, flagged_empty, is_empty, payload, seal, stamp
from decent_opt.monitoring.ranges import phase
from decent_opt.topology import Peers

_Number = TypeVar("_Number", int, float)
Allocate = Callable[[str, int], Tensor]
"""allocate(slot, nbytes) -> uint8 buffer; the name of the slot lets a round reuse its buffers."""


@dataclass
class Mixing:
    """What a round did: bytes and seconds per peer, and how far the own tensors were moved.

    Attributes:
        spread: estimate of this worker's distance to the average, from what was exchanged (0-d tensor, float32).
            If the deviations of the workers are independent with norm s, the correction has norm
            s sqrt((1 - w_kk)^2 + sum_{j != k} w_kj^2); `spread` solves for s.
        identical: in round 0, whether all neighbours have sent exactly what this worker has; None in later rounds.
        error, scale: with public copies, ||x - xhat||^2 before the round's message and ||x||^2 (0-d); else None.
        empty_from: peers whose update was empty, because it was not finite (not known on an accelerator).
        bad: for each bucket that was sent, which of its pieces were not finite.
        lost: for each bucket, () bool: neither this worker nor a neighbour has finite values.
        reported: names of this worker's tensors that were not finite, as far as they were asked for.
    """

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    encode_seconds: float = 0.0
    wait_seconds: dict[int, float] = field(default_factory=dict)
    decode_seconds: float = 0.0
    spread: Tensor = field(default_factory=lambda: torch.zeros(()))
    identical: bool | None = None
    error: Tensor | None = None
    scale: Tensor | None = None
    empty_from: list[int] = field(default_factory=list)
    bad: list[tuple[Bucket, Tensor]] = field(default_factory=list)
    lost: list[Tensor] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)

    def not_finite(self) -> list[int]:
        """Which of this worker's tensors were not finite; reads the flags, so the host waits."""
        return indices([bucket for bucket, _ in self.bad], [flags for _, flags in self.bad])

    def count(self, traffic: Traffic) -> None:
        """Add what an exchange has moved."""
        _add_into(self.sent, traffic.sent)
        _add_into(self.received, traffic.received)
        _add_into(self.wait_seconds, traffic.wait_seconds)

    def estimate_spread(self, corrections: list[Tensor], peers: Peers) -> None:
        """Set `spread` from the norms of the corrections that the buckets got."""
        if corrections:
            moved = torch.stack([c.to(corrections[0].device, torch.float32) for c in corrections]).norm()
            gain = (1.0 - peers.self_weight) ** 2 + sum(w * w for w in peers.receive.values())
            self.spread = moved / (gain**0.5 or 1.0)


class BucketExchange:
    """Encodes and posts a bucket at construction; `mixed` waits and sums up."""

    def __init__(
        self,
        transport: Transport,
        peers: Peers,
        round: int,
        bucket: Bucket,
        dtype: torch.dtype,
        allocate: Allocate,
        mixing: Mixing,
    ) -> None:
        self.transport, self.peers, self.round = transport, peers, round
        self.bucket, self.dtype, self.mixing = bucket, dtype, mixing
        began = time.perf_counter()
        with phase("encode"):
            self._encode(allocate)
        mixing.encode_seconds += time.perf_counter() - began
        if round == 0 and peers.receive and mixing.identical is None:
            mixing.identical = True
        self._pending = transport.post(dict.fromkeys(peers.send, self._message), self._incoming, round)

    def _encode(self, allocate: Allocate) -> None:
        nbytes = HEADER_BYTES + self.bucket.numel * self.dtype.itemsize
        self._message = allocate("out", nbytes)
        self._incoming = {peer: allocate(f"from {peer}", nbytes) for peer in self.peers.receive}
        stamp(self._message, self.round, self.transport.rank)
        bad = not_finite(self.bucket.pieces)
        self.mixing.bad.append((self.bucket, bad))
        self._empty = bad.any()
        flag_empty(self._message, self._empty)
        self.bucket.blank_(self._empty)
        self.bucket.read(self.own)
        if self.dtype == torch.float16 and self.bucket.dtype != torch.float16:
            most = torch.finfo(torch.float16).max
            self.own.clamp_(-most, most)  # finite values do not become infinite; what is cut off stays here
        seal(self._message)

    @property
    def own(self) -> Tensor:
        """What this worker sent, q_k, of shape (numel,); free for other use once `mixed` has returned."""
        return payload(self._message).view(self.dtype)

    def mixed(self, into: Tensor) -> Tensor:
        """Wait for the neighbours and return `into` = sum_j w_kj q_j, of shape (numel,), float32 at least.

        q_k stands in for q_j where that is not finite; where q_k itself is not, its neighbours' weighted mean is taken.
        """
        with phase("wait"):
            self.mixing.count(self._pending.wait())
        for peer, message in self._incoming.items():
            check(message, self.round, peer, self.transport.rank)
        if self.mixing.identical:
            own = payload(self._message)
            self.mixing.identical = all(torch.equal(payload(m), own) for m in self._incoming.values())
        began = time.perf_counter()
        weights = {self.transport.rank: self.peers.self_weight, **self.peers.receive}
        with phase("decode"):
            into.zero_()
            for peer in sorted(weights):
                into.add_(self._term(peer), alpha=weights[peer])
            if self._empty.device.type != "cpu" or self._empty:
                weight = self._weight_of_the_finite()
                self.mixing.lost.append(self._empty & (weight == 0))
                into.div_(torch.where(self._empty, weight, 1.0))
        self.mixing.decode_seconds += time.perf_counter() - began
        return into

    def _term(self, peer: int) -> Tensor:
        """q_j, or q_k in its place."""
        if peer == self.transport.rank:
            return self.own
        message = self._incoming[peer]
        term = payload(message).view(self.dtype)
        if message.device.type != "cpu":
            return torch.where(flagged_empty(message), self.own, term)
        if not is_empty(message):
            return term
        if peer not in self.mixing.empty_from:
            self.mixing.empty_from.append(peer)
        return self.own

    def _weight_of_the_finite(self) -> Tensor:
        """sum of w_kj over the neighbours whose update is not empty."""
        total = torch.zeros((), device=self._empty.device)
        for peer, weight in self.peers.receive.items():
            total += weight * flagged_empty(self._incoming[peer]).logical_not()
        return total


def _add_into(total: dict[int, _Number], part: dict[int, _Number]) -> None:
    for key, value in part.items():
        total[key] = total[key] + value if key in total else value
