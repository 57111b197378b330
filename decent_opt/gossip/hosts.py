"""A round across hosts: the workers of a host hold the same parameters and share the work of mixing them.

Of g workers on a host, worker i exchanges every g-th bucket with its counterparts on the neighbouring hosts and
hands the result on to the others of its host. So a host sends each parameter once per neighbour, through all of its
network cards, and inside a host the workers stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.gossip.exchange import Mixing
from decent_opt.gossip.periodic import PeriodicGossip
from decent_opt.topology import Topology


class HostGossip(PeriodicGossip):
    """`PeriodicGossip` between hosts.

    Args:
        transport: to the counterparts on the other hosts.
        inside: to the workers of the own host.
        topology, bucket_bytes, message_dtype: as in `PeriodicGossip`; the topology's workers are the hosts.
    """

    def __init__(
        self,
        transport: Transport,
        inside: Transport,
        topology: Topology,
        bucket_bytes: int,
        message_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(transport, topology, bucket_bytes, message_dtype)
        self.inside = inside
        self._limit = bucket_bytes

    def start(self, tensors: Sequence[Tensor], round: int, remainders: Sequence[Tensor | None] | None = None) -> None:
        """Encode and post the first bucket of this worker's share."""
        # At least a bucket for each worker of the host, so that all have something to do.
        share = -(-sum(t.nbytes for t in tensors) // self.inside.size)
        self.bucket_bytes = max(1, min(self._limit, share))
        super().start(tensors, round, remainders)

    def _post_first(self) -> None:
        if self.inside.rank < len(self._buckets):
            self._exchange = self._post(self._buckets[self.inside.rank])

    def finish(self) -> Mixing:
        """Mix the own share, and pass all shares around inside the host."""
        g, me = self.inside.size, self.inside.rank
        for wave in range(0, len(self._buckets), g):
            values = self._mix(self._buckets[wave + me]) if wave + me < len(self._buckets) else None
            for place, bucket in enumerate(self._buckets[wave : wave + g]):
                if place != me or values is None:
                    received = torch.empty(bucket.numel, dtype=bucket.wide, device=bucket.device)
                    self.inside.broadcast_([received], source=place)
                    bucket.write(received)
                else:
                    self.inside.broadcast_([values], source=place)
            if wave + g + me < len(self._buckets):
                self._exchange = self._post(self._buckets[wave + g + me])
        self._norms = [norm * g**0.5 for norm in self._norms]  # this worker has seen one g-th of the elements
        return self._done()
