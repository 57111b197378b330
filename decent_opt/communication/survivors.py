"""Transport of those who go on after a loss: a gloo group of their own, outside of torch's list of groups.

torch makes groups through the store of rank 0, which may be the one that died.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from decent_opt.communication.distributed import DistributedPending, DistributedTransport
from decent_opt.communication.transport import ring_all_reduce_bytes


class SurvivorsTransport(DistributedTransport):
    """The ranks of a store, numbered anew.

    Args:
        store: that all of them reach.
        rank, size: of this worker among the survivors, and of these.
        timeout, warn_after: as in `DistributedTransport`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, warn_after: float = 30.0) -> None:
        self.timeout, self.warn_after, self.rank, self.size = timeout, warn_after, rank, size
        make = partial(dist.ProcessGroupGloo, store, rank, size, timedelta(seconds=timeout))
        self.group = cast(dist.ProcessGroup, self._guarded(make, None, -1))
        self._closed = False

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], round: int) -> DistributedPending:
        works: list[tuple[int, dist.Work]] = []
        for peer, buffer in receives.items():
            works.append((peer, self._guarded(partial(self.group.recv, [buffer], peer, 0), peer, round)))
        for peer, buffer in sends.items():
            works.append((peer, self._guarded(partial(self.group.send, [buffer], peer, 0), peer, round)))
        return DistributedPending(self, works, dict(sends), dict(receives), round)

    def average_(self, tensors: Sequence[Tensor]) -> int:
        for tensor in tensors:
            self._wait(partial(self.group.allreduce, [tensor]))
            tensor.div_(self.size)
        return sum(ring_all_reduce_bytes(t.nbytes, self.size) for t in tensors)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        for tensor in tensors:
            self._wait(partial(self.group.broadcast, tensor, source))

    def gather(self, item: object) -> list[object]:
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([data.numel()]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self._all_gather(padded)
        return [pickle.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def close(self) -> None:
        """The group goes with this object."""

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(partial(self.group.allgather, rows, tensor))
        return rows

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        self._collective(lambda: start().wait())
