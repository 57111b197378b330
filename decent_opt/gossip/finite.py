"""Values that are not finite never leave their worker.

A worker whose bucket has one sends zeros, marked as an empty update (`message.flag_empty`). Its neighbours use their
own values in their place, so a missing neighbour's weight goes to oneself. The worker itself takes the weighted mean
of its neighbours' values. In exact averages the mean is over the workers that are left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_opt.gossip.buckets import Bucket


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Which tensors have an infinite or NaN element: (len(tensors),), bool. An accelerator's host is not stopped."""
    if tensors[0].device.type == "cpu":
        # A sum is not finite if one of its terms is not; that it may overflow makes it a first look only.
        sums = torch.stack([t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors])
        if bool(sums.isfinite().all()):
            return torch.zeros(len(tensors), dtype=torch.bool)
    return torch.stack([t.isfinite().all().logical_not().to(tensors[0].device) for t in tensors])


def indices(buckets: Sequence[Bucket], bad: Sequence[Tensor]) -> list[int]:
    """Which of the tensors that the buckets were cut from are not finite; reads the flags, so the host waits."""
    found = set()
    for bucket, flags in zip(buckets, bad, strict=True):
        found |= {span[0] for span, flag in zip(bucket.spans, flags.tolist(), strict=True) if flag}
    return sorted(found)
