"""Exact consensus: the workers' average, for good or for the length of a block, and the distance to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.gossip import average_, broadcast_, make_buckets

Remainders = Sequence[Tensor | None]


@contextmanager
def averaged(
    transport: Transport,
    tensors: Sequence[Tensor],
    remainders: Remainders,
    bucket_bytes: int,
    broadcast: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Hold the workers' average inside the block, and every worker's own values again after it. Collective.

    Args:
        broadcast: tensors that hold rank 0's values inside the block.
    """
    touched = [*tensors, *broadcast, *(r for r in remainders if r is not None)]
    own = [t.detach().clone() for t in touched]
    with torch.no_grad():
        average_(transport, tensors, bucket_bytes, remainders)
        broadcast_(transport, broadcast, bucket_bytes)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(touched, own, strict=True):
                tensor.copy_(value)


@torch.no_grad()
def distance(transport: Transport, tensors: Sequence[Tensor], remainders: Remainders, bucket_bytes: int) -> float:
    """Return sqrt((1/n) sum_k ||x_k - xbar||^2), exactly. Collective; costs one all-reduce of the model."""
    square = torch.zeros(1, dtype=torch.float64)
    for bucket in make_buckets(tensors, bucket_bytes, remainders):
        values = torch.empty(bucket.numel, dtype=bucket.wide, device=bucket.device)
        bucket.read(values)
        mean = values.clone()
        transport.average_([mean])
        square += float(torch.linalg.vector_norm(values.sub_(mean))) ** 2
    square = square.to(tensors[0].device)
    transport.average_([square])
    return float(square.sqrt())
