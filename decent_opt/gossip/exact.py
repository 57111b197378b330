"""Exact averages and broadcasts of a list of tensors of any dtype and shape, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.gossip.buckets import MIXABLE, make_buckets


def average_(
    transport: Transport,
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    remainders: Sequence[Tensor | None] | None = None,
) -> int:
    """x_k <- (1/n) sum_j x_j, bit-equal on every rank; return the bytes that this rank sent.

    16-bit tensors travel and are summed in float32, so that the mean is rounded once; with remainders
    (`gossip.buckets.Bucket`) not even that.
    """
    sent = 0
    for bucket in make_buckets(tensors, bucket_bytes, remainders):
        flat = torch.empty(bucket.numel, dtype=bucket.wide, device=bucket.device)
        bucket.read(flat)
        sent += transport.average_([flat])
        bucket.write(flat)
    return sent


def broadcast_(transport: Transport, tensors: Sequence[Tensor], bucket_bytes: int) -> None:
    """x_k <- x_0 for every tensor, of any dtype."""
    floating = [t for t in tensors if t.dtype in MIXABLE]
    for bucket in make_buckets(floating, bucket_bytes):
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        bucket.read(flat)
        transport.broadcast_([flat])
        bucket.write(flat)
    for tensor in tensors:
        if tensor.dtype not in MIXABLE and tensor.numel():
            # As bytes: the backends do not take every dtype.
            value = tensor.detach().reshape(-1).clone()
            transport.broadcast_([value.view(torch.uint8)])
            tensor.detach().copy_(value.view(tensor.shape))
