"""One round of PD-SGDM: every worker replaces its tensors by a weighted average with its neighbours'.

    x_k <- sum_j w_kj x_j          (arXiv 2008.10435, the communication step of PD-SGDM; also D-PSGD at p = 1)

With messages narrower than the tensors (q = x rounded to bfloat16, say) the difference is applied instead,
x_k <- x_k + sum_j w_kj q_j - q_k, which keeps the workers' average whatever the rounding.

A round has two phases. `start` encodes and posts the first bucket, `finish` waits for it, mixes it in place and
goes on bucket by bucket. At any time a round holds at most degree + 2 buckets: one message out, one in from each
neighbour, and the accumulator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.gossip.buckets import Bucket, make_buckets
from decent_opt.gossip.exchange import BucketExchange, Mixing
from decent_opt.topology import Peers, Topology


class PeriodicGossip:
    """Mixes a list of tensors with the neighbours of a topology.

    Args:
        transport: this worker's access to the others.
        topology: mixing matrix of each round.
        bucket_bytes: upper limit of one message's payload.
        message_dtype: of the messages, where it is narrower than the tensors; None sends them as they are.
    """

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        bucket_bytes: int,
        message_dtype: torch.dtype | None = None,
    ) -> None:
        self.transport, self.topology, self.bucket_bytes = transport, topology, bucket_bytes
        self.message_dtype = message_dtype

    def start(self, tensors: Sequence[Tensor], round: int, remainders: Sequence[Tensor | None] | None = None) -> None:
        """Encode and post the first bucket. The tensors must not change before `finish`."""
        self._round = round
        self._peers: Peers = self.topology.peers(self.transport.rank, round)
        self._buckets = make_buckets(tensors, self.bucket_bytes, remainders)
        self._mixing, self._norms = Mixing(), list[Tensor]()
        self._pools: dict[object, Tensor] = {}
        self._post_first()

    def _post_first(self) -> None:
        if self._buckets:
            self._exchange = self._post(self._buckets[0])

    def finish(self) -> Mixing:
        """x <- sum_j w_kj x_j, in place and bucket by bucket; return what was moved."""
        for index, bucket in enumerate(self._buckets):
            self._mix(bucket)
            if index + 1 < len(self._buckets):
                self._exchange = self._post(self._buckets[index + 1])
        return self._done()

    def _done(self) -> Mixing:
        self._mixing.estimate_spread(self._norms, self._peers)
        self._buckets, self._pools = [], {}
        return self._mixing

    def _post(self, bucket: Bucket) -> BucketExchange:
        dtype = message_dtype_of(bucket, self.message_dtype)

        def allocate(slot: str, nbytes: int) -> Tensor:
            return self._pool(bucket, slot, nbytes)

        return BucketExchange(self.transport, self._peers, self._round, bucket, dtype, allocate, self._mixing)

    def _mix(self, bucket: Bucket) -> Tensor:
        """Mix the bucket that is on its way; return its new values, until the next bucket uses the room."""
        exchange = self._exchange
        wide = self._pool(bucket, "sum", bucket.numel * bucket.wide.itemsize).view(bucket.wide)
        mixed = exchange.mixed(wide)
        began = time.perf_counter()
        if exchange.dtype == bucket.wide or exchange.dtype == bucket.dtype:
            bucket.write(mixed)
            # The sends are done, so the message may serve as scratch for the correction.
            self._norms.append(torch.linalg.vector_norm(exchange.own.sub_(mixed)))
        else:
            correction = mixed.sub_(exchange.own)
            self._norms.append(torch.linalg.vector_norm(correction))
            bucket.add(correction)
        self._mixing.decode_seconds += time.perf_counter() - began
        return mixed

    def _pool(self, bucket: Bucket, slot: str, nbytes: int) -> Tensor:
        # One allocation per slot that all buckets of the round use in turn; a fresh one per bucket would leave holes
        # that the next does not quite fit into, and grow the process by the size of the model.
        key = (slot, bucket.kind)
        if key not in self._pools or self._pools[key].numel() < nbytes:
            longest = max(b.numel for b in self._buckets if b.kind == bucket.kind)
            room = nbytes + (longest - bucket.numel) * bucket.wide.itemsize
            self._pools[key] = torch.empty(room, dtype=torch.uint8, device=bucket.device)
        return self._pools[key][:nbytes]


def message_dtype_of(bucket: Bucket, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a bucket travels: what is wanted if that is narrower, else the bucket's full value."""
    full = bucket.wide if bucket.remainders else bucket.dtype
    return wanted if wanted is not None and wanted.itemsize < full.itemsize else full
