"""A round that runs while the worker goes on: the exchange of x_t hides behind the next local steps.

    posted after step t:       q_k = x_k,t
    applied after step t + s:  x_k <- x_k + c_k,     c_k = sum_j w_kj q_j - q_k

This is the combine-while-adapt order of D-PSGD (Lian et al. 2017), x_{t+1} = W x_t - lr g(x_t), with s local steps in
place of one; PD-SGDM itself would add the steps first and mix afterwards. The corrections of all workers sum to zero
for any doubly stochastic W, so the average moves as without the delay. All messages of a round are held at once:
degree + 1 encoded models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.gossip.buckets import Bucket, flatten, make_buckets
from decent_opt.gossip.exchange import BucketExchange, Mixing
from decent_opt.gossip.periodic import message_dtype_of
from decent_opt.topology import Peers, Topology


class OverlappedGossip:
    """Mixes a list of tensors with the neighbours of a topology, some steps late; arguments as `PeriodicGossip`."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        bucket_bytes: int,
        message_dtype: torch.dtype | None = None,
    ) -> None:
        self.transport, self.topology, self.bucket_bytes = transport, topology, bucket_bytes
        self.message_dtype = message_dtype
        self._exchanges: list[BucketExchange] = []

    def start(self, tensors: Sequence[Tensor], round: int, remainders: Sequence[Tensor | None] | None = None) -> Mixing:
        """Encode and post all buckets. The tensors may change from here on, but not their storage.

        What is returned says what was not finite; `finish` completes it.
        """
        self._peers: Peers = self.topology.peers(self.transport.rank, round)
        self._mixing = Mixing()
        self._exchanges = [
            BucketExchange(
                self.transport,
                self._peers,
                round,
                bucket,
                message_dtype_of(bucket, self.message_dtype),
                lambda _, nbytes, device=bucket.device: torch.empty(nbytes, dtype=torch.uint8, device=device),  # type: ignore[misc]
                self._mixing,
            )
            for bucket in make_buckets(tensors, self.bucket_bytes, remainders)
        ]
        return self._mixing

    @property
    def in_flight(self) -> bool:
        """Has a round been started and not finished?"""
        return bool(self._exchanges)

    def finish(self, into: Sequence[Tensor] | None = None) -> Mixing:
        """Wait, and x <- x + c; or, with `into`, store c there and leave x as it is.

        Args:
            into: for each tensor one of its shape and memory order, float32 at least.
        """
        norms: list[Tensor] = []
        for exchange in self._exchanges:
            bucket = exchange.bucket
            wide = torch.empty(bucket.numel, dtype=bucket.wide, device=bucket.device)
            correction = exchange.mixed(wide).sub_(exchange.own)
            norms.append(torch.linalg.vector_norm(correction))
            if into is None:
                bucket.add(correction)
            else:
                torch._foreach_copy_(_parts(bucket, into), bucket.split(correction))
        self._mixing.estimate_spread(norms, self._peers)
        self._exchanges = []
        return self._mixing


def apply_corrections(
    tensors: Sequence[Tensor], corrections: Sequence[Tensor], remainders: Sequence[Tensor | None], bucket_bytes: int
) -> None:
    """x <- x + c for corrections that `finish(into=...)` has stored; the same bits as `finish` itself."""
    for bucket in make_buckets(tensors, bucket_bytes, remainders):
        bucket.add(torch.cat(_parts(bucket, corrections)))


def _parts(bucket: Bucket, corrections: Sequence[Tensor]) -> list[Tensor]:
    return [flatten(corrections[index])[0][start:stop] for index, start, stop in bucket.spans]
