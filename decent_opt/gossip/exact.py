"""Exact averages and broadcasts of a list of tensors of any dtype and shape, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.gossip.buckets import MIXABLE, blank_, make_buckets
from decent_opt.gossip.finite import indices, not_finite


class Averaged(NamedTuple):
    """What an exact average did.

    Attributes:
        sent: bytes that this rank sent.
        used: (buckets,), the share of the workers whose values were finite; the same on all ranks.
    """

    sent: int
    used: Tensor


def average_(
    transport: Transport,
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    remainders: Sequence[Tensor | None] | None = None,
    report: Callable[[list[int]], object] | None = None,
) -> Averaged:
    """x_k <- (1/n) sum_j x_j, bit-equal on every rank, over the workers whose bucket is finite.

    16-bit tensors travel and are summed in float32, so that the mean is rounded once; with remainders
    (`gossip.buckets.Bucket`) not even that.

    Args:
        report: told before the average which of this rank's tensors are not finite; the host waits for that.
    """
    buckets = make_buckets(tensors, bucket_bytes, remainders)
    if not buckets:
        return Averaged(0, torch.ones(0))
    bad = [not_finite(bucket.pieces) for bucket in buckets]
    if report is not None:
        report(indices(buckets, bad))
    used = torch.stack([flags.any().logical_not().to(bad[0].device) for flags in bad]).float()
    sent = transport.average_([used])
    for bucket, flags, share in zip(buckets, bad, used, strict=True):
        flat = torch.empty(bucket.numel, dtype=bucket.wide, device=bucket.device)
        bucket.read(flat)
        blank_([flat], flags.any())
        sent += transport.average_([flat])
        if share.device.type != "cpu" or share < 1:
            flat.div_(share)
        bucket.write(flat)
    return Averaged(sent, used)


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
