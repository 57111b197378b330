"""The baseline of the comparisons: DDP's own all-reduce of gradients, with its bytes counted.

ddp.register_comm_hook(AllReduce(monitor), counted_all_reduce)
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from decent_opt.communication import ring_all_reduce_bytes
from decent_opt.integrations.hook_state import all_reduced
from decent_opt.monitoring import Monitor, RoundRecord


@dataclass
class AllReduce:
    """State of `counted_all_reduce`.

    Attributes:
        monitor: gets a record for each bucket, of the kind "gradient".
        step: the optimizer step that the coming gradients are for, from 1.
    """

    monitor: Monitor
    step: int = 1


def counted_all_reduce(state: AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over the workers, as without a hook; the bytes are those of the buffer really reduced."""
    buffer, workers = bucket.buffer(), dist.get_world_size()
    sent = ring_all_reduce_bytes(buffer.nbytes, workers)
    state.monitor.emit(RoundRecord("gradient", state.step, -1, {-1: sent}, {-1: sent}, sent))
    state.step += bucket.is_last()
    return all_reduced(buffer, None, workers)
