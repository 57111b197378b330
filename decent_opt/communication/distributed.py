"""Transport over torch.distributed: gloo on CPU, NCCL on CUDA, one process per rank.

It makes its own process group, for two reasons: the timeout is ours (torch's default is 30 minutes), and nothing
that the user's program does on its own groups can interleave with our messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from decent_opt.communication.transport import Traffic, ring_all_reduce_bytes
from decent_opt.errors import ConfigError, DecentError, PeerLost

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class DistributedTransport:
    """The ranks of a process group (default: the whole world).

    Args:
        process_group: its members take part; ranks are ranks inside this group.
        timeout: seconds after which a wait for a peer raises `PeerLost`.
        warn_after: seconds after which a wait logs a warning that names the peer.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: float = 300.0, warn_after: float = 30.0
    ) -> None:
        if not dist.is_initialized():
            raise DecentError("torch.distributed is not initialised: call init_process_group() first")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError("process_group: this rank is no member of it; make the optimizer on its members only")
        self.timeout, self.warn_after = timeout, warn_after
        self.rank = dist.get_rank()
        members = None if process_group is None else dist.get_process_group_ranks(process_group)
        join = partial(dist.new_group, members, timeout=timedelta(seconds=timeout))
        # Only the members can be asked to take part when the group is a part of the world.
        self.group: dist.ProcessGroup = self._guarded(
            partial(join, use_local_synchronization=members is not None), None, -1
        )
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._closed = False

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], round: int) -> DistributedPending:
        # Every receive before any send: in the other order gloo runs the two directions of a pair one after
        # the other, at half of the link's rate.
        works: list[tuple[int, dist.Work]] = []
        if dist.get_backend(self.group) == dist.Backend.NCCL:
            # NCCL deadlocks on ungrouped sends and receives of a pair, so they go as one batch. It answers with
            # one work for all of them; the first peer's name has to stand for the others in an error.
            batch = [dist.P2POp(dist.irecv, b, group=self.group, group_peer=p) for p, b in receives.items()]
            batch += [dist.P2POp(dist.isend, b, group=self.group, group_peer=p) for p, b in sends.items()]
            peer = next(iter(receives or sends), 0)
            if batch:
                works = [(peer, w) for w in self._guarded(partial(dist.batch_isend_irecv, batch), peer, round)]
        else:
            for peer, buffer in receives.items():
                works.append((peer, self._guarded(partial(self._irecv, buffer, peer), peer, round)))
            for peer, buffer in sends.items():
                # A send to a peer that has died fails already here, not at the wait.
                works.append((peer, self._guarded(partial(self._isend, buffer, peer), peer, round)))
        return DistributedPending(self, works, dict(sends), dict(receives), round)

    def average_(self, tensors: Sequence[Tensor]) -> int:
        for tensor in tensors:
            self._collective(partial(dist.all_reduce, tensor, group=self.group))
            tensor.div_(self.size)
        return sum(ring_all_reduce_bytes(t.nbytes, self.size) for t in tensors)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        for tensor in tensors:
            self._collective(partial(dist.broadcast, tensor, group=self.group, group_src=source))

    def gather(self, item: object) -> list[object]:
        items: list[object] = [None] * self.size
        self._collective(partial(dist.all_gather_object, items, item, group=self.group))
        return items

    def close(self) -> None:
        if not self._closed and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._closed = True

    def _irecv(self, buffer: Tensor, peer: int) -> dist.Work:
        return cast(dist.Work, dist.irecv(buffer, group=self.group, group_src=peer))

    def _isend(self, buffer: Tensor, peer: int) -> dist.Work:
        return cast(dist.Work, dist.isend(buffer, group=self.group, group_dst=peer))

    def _collective(self, call: Callable[[], object]) -> None:
        with self._warn_when_slow("the other ranks"):
            self._guarded(call, None, -1)

    def _guarded(self, call: Callable[[], _Result], peer: int | None, round: int) -> _Result:
        """Run a call of torch.distributed; turn its failure into a `PeerLost` that names peer and round."""
        try:
            return call()
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            who = f"rank {peer} did not answer" if peer is not None else "a collective failed"
            when = f" in round {round}" if round >= 0 else ""
            raise PeerLost(
                f"rank {self.rank}: {who}{when} (dead, stalled or out of step; the timeout is "
                f"{self.timeout:g} s): {first_line}",
                rank=peer,
                round=round,
            ) from error

    @contextmanager
    def _warn_when_slow(self, who: str, round: int = -1) -> Iterator[None]:
        # A timed wait on the work itself is no probe: when it expires, gloo closes the connection.
        when = f" in round {round}" if round >= 0 else ""
        timer = threading.Timer(
            self.warn_after,
            lambda: logger.warning("rank %d has waited %g s for %s%s", self.rank, self.warn_after, who, when),
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class DistributedPending:
    """Posted sends and receives. It keeps the buffers alive until they are done."""

    def __init__(
        self,
        transport: DistributedTransport,
        works: list[tuple[int, dist.Work]],
        sends: dict[int, Tensor],
        receives: dict[int, Tensor],
        round: int,
    ) -> None:
        self.transport, self.works, self.sends, self.receives, self.round = (
            transport,
            works,
            sends,
            receives,
            round,
        )

    def wait(self) -> Traffic:
        """Wait for each work in turn. With NCCL this orders the current stream and does not block the host."""
        traffic = Traffic(
            sent={peer: buffer.nbytes for peer, buffer in self.sends.items()},
            received={peer: buffer.nbytes for peer, buffer in self.receives.items()},
        )
        for peer, work in self.works:
            began = time.perf_counter()
            with self.transport._warn_when_slow(f"rank {peer}", self.round):
                self.transport._guarded(work.wait, peer, self.round)
            spent = time.perf_counter() - began
            traffic.wait_seconds[peer] = traffic.wait_seconds.get(peer, 0.0) + spent
        self.works = []
        return traffic
