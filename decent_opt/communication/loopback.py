"""Loopback: n ranks as n threads of one process, for tests, simulation and a first try without a cluster.

Messages are copied at `post` and delivered in order for each pair of ranks, exactly as between processes.
Everything blocks with a time limit; when one thread fails, `LoopbackWorld.abort` wakes all others at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from decent_opt.communication.transport import Traffic, ring_all_reduce_bytes
from decent_opt.errors import PeerLost

_ABORT = object()


class LoopbackWorld:
    """What the threads share: mailboxes for each ordered pair of ranks, and one board for the collectives."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._mailboxes: dict[tuple[int, int, int], queue.Queue[Any]] = {}
        self._lock = threading.Lock()
        self.board: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.aborted = False

    def mailbox(self, channel: int, sender: int, receiver: int) -> queue.Queue[Any]:
        """What one rank sends to another on one channel."""
        with self._lock:
            box = self._mailboxes.get((channel, sender, receiver))
            if box is None:
                box = self._mailboxes[channel, sender, receiver] = queue.Queue()
                if self.aborted:
                    box.put(_ABORT)
            return box

    def abort(self) -> None:
        """Wake every waiting thread with an error: a rank has failed."""
        with self._lock:
            self.aborted = True
            mailboxes = list(self._mailboxes.values())
        self.barrier.abort()
        for mailbox in mailboxes:
            mailbox.put(_ABORT)


class LoopbackTransport:
    """One thread's side of a `LoopbackWorld`; the default is a world of one rank."""

    def __init__(self, world: LoopbackWorld | None = None, rank: int = 0, channel: int = 0) -> None:
        self.world = world if world is not None else LoopbackWorld(1)
        self.rank, self.channel = rank, channel
        self.size = self.world.size
        self._channels = channel

    def of_its_own(self) -> LoopbackTransport:
        """A transport to the same ranks whose messages do not meet those of others; all ranks ask in the same order."""
        self._channels += 1
        return LoopbackTransport(self.world, self.rank, self._channels)

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], round: int) -> LoopbackPending:
        for peer, buffer in sends.items():
            self.world.mailbox(self.channel, self.rank, peer).put(buffer.clone())
        sent = {peer: buffer.nbytes for peer, buffer in sends.items()}
        return LoopbackPending(self, sent, receives, round)

    def average_(self, tensors: Sequence[Tensor]) -> int:
        if self.size == 1:
            return 0
        for rows in zip(*self._exchange([t.detach().clone() for t in tensors]), tensors, strict=True):
            *values, target = rows
            target.detach().copy_(torch.stack(values).sum(0).div_(self.size))
        return sum(ring_all_reduce_bytes(t.nbytes, self.size) for t in tensors)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        first = self._exchange([t.detach().clone() for t in tensors] if self.rank == source else None)[source]
        for target, value in zip(tensors, first, strict=True):
            target.detach().copy_(value)

    def gather(self, item: object) -> list[object]:
        return self._exchange(item)

    def close(self) -> None:
        """Nothing is held: the world belongs to whoever made it."""

    def _exchange(self, item: Any) -> list[Any]:
        """Put an item on the board and read all of them; two barriers, so that nobody reads a later one."""
        world = self.world
        world.board[self.rank] = item
        try:
            world.barrier.wait()
        except threading.BrokenBarrierError:
            why = "another rank failed" if world.aborted else f"a rank did not join within {world.timeout:g} s"
            raise PeerLost(f"rank {self.rank}: a collective failed: {why}", rank=None, round=-1) from None
        items = list(world.board)
        # A rank that fails over what it has read breaks this one; the others have read theirs all the same.
        with suppress(threading.BrokenBarrierError):
            world.barrier.wait()
        return items


class LoopbackPending:
    """Receives that are taken out of the mailboxes when they are waited for."""

    def __init__(
        self, transport: LoopbackTransport, sent: dict[int, int], receives: Mapping[int, Tensor], round: int
    ) -> None:
        self.transport, self.sent, self.receives, self.round = transport, sent, receives, round

    def wait(self) -> Traffic:
        traffic = Traffic(sent=self.sent)
        for peer, buffer in self.receives.items():
            began = time.perf_counter()
            message = self._take(peer)
            traffic.wait_seconds[peer] = time.perf_counter() - began
            traffic.received[peer] = message.nbytes
            if message.numel() != buffer.numel():
                raise PeerLost(
                    f"rank {self.transport.rank}: the message of rank {peer} in round {self.round} has "
                    f"{message.numel()} bytes, expected {buffer.numel()}",
                    rank=peer,
                    round=self.round,
                )
            buffer.copy_(message)
        return traffic

    def _take(self, peer: int) -> Tensor:
        world, rank = self.transport.world, self.transport.rank
        try:
            message = world.mailbox(self.transport.channel, peer, rank).get(timeout=world.timeout)
        except queue.Empty:
            message = None
        if message is None or message is _ABORT:
            why = "a rank failed" if message is _ABORT else f"waited {world.timeout:g} s"
            raise PeerLost(
                f"rank {rank}: no message from rank {peer} in round {self.round} ({why})",
                rank=peer,
                round=self.round,
            )
        return message
