"""One round of PD-SGDM: every worker replaces its tensors by a weighted average with its neighbours'.

    x_k <- sum_j w_kj x_j          (arXiv 2008.10435, the communication step of PD-SGDM; also D-PSGD at p = 1)

A round has two phases. `start` encodes and posts the first bucket, `finish` waits for it, mixes it in place and
goes on bucket by bucket. At any time a round holds at most degree + 2 buckets: one message out, one in from each
neighbour, and the accumulator. Terms are summed in the order of the ranks, the own one included, so that workers
with the same weights get the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from decent_opt.communication import Pending, Transport
from decent_opt.gossip.buckets import Bucket, make_buckets
from decent_opt.gossip.message import HEADER_BYTES, check, payload, stamp
from decent_opt.monitoring.ranges import phase
from decent_opt.topology import Peers, Topology

_Number = TypeVar("_Number", int, float)


@dataclass
class Mixing:
    """What a round did: bytes and seconds per peer, and how far the own tensors were moved.

    Attributes:
        spread: estimate of this worker's distance to the average, from what was exchanged (0-d tensor, float32).
            If the deviations of the workers are independent with norm s, the correction has norm
            s sqrt((1 - w_kk)^2 + sum_{j != k} w_kj^2); `spread` solves for s.
    """

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    encode_seconds: float = 0.0
    wait_seconds: dict[int, float] = field(default_factory=dict)
    decode_seconds: float = 0.0
    spread: Tensor = field(default_factory=lambda: torch.zeros(()))


class PeriodicGossip:
    """Mixes a list of tensors with the neighbours of a topology.

    Args:
        transport: this worker's access to the others.
        topology: mixing matrix of each round.
        bucket_bytes: upper limit of one message's payload.
    """

    def __init__(self, transport: Transport, topology: Topology, bucket_bytes: int) -> None:
        self.transport, self.topology, self.bucket_bytes = transport, topology, bucket_bytes
        self._pending: Pending | None = None

    def start(self, tensors: Sequence[Tensor], round: int) -> None:
        """Encode and post the first bucket. The tensors must not change before `finish`."""
        self._round = round
        self._peers: Peers = self.topology.peers(self.transport.rank, round)
        self._buckets = make_buckets(tensors, self.bucket_bytes)
        self._mixing = Mixing()
        self._pools: dict[tuple[object, object], Tensor] = {}
        if self._buckets:
            self._post(self._buckets[0])

    def finish(self) -> Mixing:
        """x <- sum_j w_kj x_j, in place and bucket by bucket; collect what was moved."""
        corrections: list[Tensor] = []
        for index, bucket in enumerate(self._buckets):
            with phase("wait"):
                self._wait()
            with phase("decode"):
                corrections.append(self._mix(bucket))
            if index + 1 < len(self._buckets):
                self._post(self._buckets[index + 1])
        if corrections:
            device = corrections[0].device
            moved = torch.stack([c.to(device, torch.float32) for c in corrections]).norm()
            self._mixing.spread = moved / _noise_gain(self._peers)
        self._buckets, self._pools = [], {}
        return self._mixing

    def _post(self, bucket: Bucket) -> None:
        began = time.perf_counter()
        with phase("encode"):
            self._message = self._buffer(bucket, "out")
            stamp(self._message, self._round, self.transport.rank)
            bucket.read(payload(self._message).view(bucket.dtype))
        self._incoming = {peer: self._buffer(bucket, peer) for peer in self._peers.receive}
        self._mixing.encode_seconds += time.perf_counter() - began
        sends = dict.fromkeys(self._peers.send, self._message)
        self._pending = self.transport.post(sends, self._incoming, self._round)

    def _wait(self) -> None:
        assert self._pending is not None
        traffic = self._pending.wait()
        self._pending = None
        for peer, message in self._incoming.items():
            check(message, self._round, peer, self.transport.rank)
        _add_into(self._mixing.sent, traffic.sent)
        _add_into(self._mixing.received, traffic.received)
        _add_into(self._mixing.wait_seconds, traffic.wait_seconds)

    def _mix(self, bucket: Bucket) -> Tensor:
        """Return the norm of the correction that was applied to this bucket."""
        began = time.perf_counter()
        own = payload(self._message).view(bucket.dtype)
        weights = {self.transport.rank: self._peers.self_weight, **self._peers.receive}
        mixed = self._accumulator(bucket).zero_()
        for peer in sorted(weights):
            term = own if peer == self.transport.rank else payload(self._incoming[peer]).view(bucket.dtype)
            mixed.add_(term, alpha=weights[peer])
        bucket.write(mixed)
        # The sends are done, so the message may serve as scratch for the correction.
        correction = torch.linalg.vector_norm(own.sub_(mixed))
        self._mixing.decode_seconds += time.perf_counter() - began
        return correction

    def _buffer(self, bucket: Bucket, slot: object) -> Tensor:
        """A message buffer for this bucket."""
        return self._pool(bucket, slot, HEADER_BYTES, bucket.dtype)

    def _accumulator(self, bucket: Bucket) -> Tensor:
        """Room to sum a bucket up in: float32 at least."""
        wide = torch.promote_types(bucket.dtype, torch.float32)
        return self._pool(bucket, "sum", 0, wide).view(wide)

    def _pool(self, bucket: Bucket, slot: object, extra: int, dtype: torch.dtype) -> Tensor:
        """Bytes for the bucket's elements in this dtype, and some extra."""
        # One allocation per slot that all buckets of the round use in turn; a fresh one per bucket would leave holes
        # that the next does not quite fit into, and grow the process by the size of the model.
        kind = (bucket.dtype, bucket.device)
        if (slot, kind) not in self._pools:
            longest = max(b.numel for b in self._buckets if (b.dtype, b.device) == kind)
            size = extra + longest * dtype.itemsize
            self._pools[slot, kind] = torch.empty(size, dtype=torch.uint8, device=bucket.device)
        return self._pools[slot, kind][: extra + bucket.numel * dtype.itemsize]


def _noise_gain(peers: Peers) -> float:
    squares = (1.0 - peers.self_weight) ** 2 + sum(w * w for w in peers.receive.values())
    return squares**0.5 or 1.0


def _add_into(total: dict[int, _Number], part: dict[int, _Number]) -> None:
    for key, value in part.items():
        total[key] = total[key] + value if key in total else value
