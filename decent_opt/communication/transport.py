"""Transport: who sends which bytes to whom, and nothing else.

A transport knows ranks and byte buffers. It does not know parameters, rounds of an algorithm or compressors:
`round` is only carried along so that an error can name it. Two implementations behave alike:
`DistributedTransport` (one process per rank) and `LoopbackTransport` (one thread per rank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass
class Traffic:
    """What one exchange moved, in bytes of the buffers that were really handed over, and how long it waited."""

    sent: dict[int, int] = field(default_factory=dict)  # peer -> bytes
    received: dict[int, int] = field(default_factory=dict)  # peer -> bytes
    wait_seconds: dict[int, float] = field(default_factory=dict)  # peer -> seconds until its message was there


class Pending(Protocol):
    """An exchange that was posted and not waited for yet."""

    def wait(self) -> Traffic:
        """Return when every receive is filled and every send buffer may be reused; raise `PeerLost` in time."""
        ...


class Transport(Protocol):
    """One rank's access to the others. Every method but `post` is collective: all ranks call it in the same order."""

    rank: int
    size: int

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], round: int) -> Pending:
        """Start to send and to receive contiguous uint8 buffers, one per peer and direction."""
        ...

    def average_(self, tensors: Sequence[Tensor]) -> int:
        """Overwrite each tensor with its exact mean over the ranks, bit-equal on all; return the bytes sent."""
        ...

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite each tensor with the source rank's."""
        ...

    def gather(self, item: object) -> list[object]:
        """Return the small picklable item of every rank, in rank order."""
        ...

    def close(self) -> None:
        """Release what the transport holds; it cannot be used afterwards."""
        ...


def ring_all_reduce_bytes(nbytes: int, size: int) -> int:
    """Bytes that each of `size` workers sends in a ring all-reduce of a buffer: 2 (n - 1) / n times its length."""
    return 2 * (size - 1) * nbytes // size
