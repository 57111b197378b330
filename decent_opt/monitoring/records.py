"""What every exchange cost: one record per round and per averaged gradient, and running totals.

Bytes are lengths of the buffers that were handed to the transport, headers included; nothing is estimated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RoundRecord:
    """One exchange of one worker.

    Attributes:
        kind: "gossip" (a round with the neighbours), "average" (an exact average of the parameters in place of a
            gossip round) or "gradient" (an exact average of gradients: warm-up, refresh of a second moment).
        step: optimizer steps finished, counting the one that the exchange belongs to.
        round: number of the round, from 0; -1 for gradients.
        bytes_sent, bytes_received: bytes per peer; under the key -1 where an exact average does not tell peers.
        allreduce_bytes: what a ring all-reduce of the same tensors would have sent: 2 (n - 1) / n of their bytes.
        encode_seconds, decode_seconds: time to fill messages, and to mix what came.
        wait_seconds: time per peer until its message was there. On CUDA the host does not wait: launch time only.
        distance: estimate of this worker's Euclidean distance to the workers' average before the round, from what
            was exchanged; exact independence of the workers is assumed (`gossip.exchange.Mixing.spread`).
        compressor: what the messages were encoded with; None where parameters were sent.
        gamma: consensus step size of CPD-SGDM, else None.
        error: CPD-SGDM: ||x - xhat||^2 before the message was made; else None.
        not_finite: names of this worker's tensors that were infinite or NaN, and that the exchange has replaced.
    """

    kind: str
    step: int
    round: int
    bytes_sent: dict[int, int] = field(default_factory=dict)
    bytes_received: dict[int, int] = field(default_factory=dict)
    allreduce_bytes: int = 0
    encode_seconds: float = 0.0
    wait_seconds: dict[int, float] = field(default_factory=dict)
    decode_seconds: float = 0.0
    distance: Tensor | None = field(default=None, compare=False)
    compressor: str | None = None
    gamma: float | None = None
    error: Tensor | None = field(default=None, compare=False)
    not_finite: list[str] = field(default_factory=list)

    @property
    def consensus_distance(self) -> float | None:
        """`distance` as a number. Reading it waits for the accelerator, so nothing here does it by itself."""
        return None if self.distance is None else float(self.distance)

    def as_dict(self) -> dict[str, Any]:
        """A flat, JSON-ready copy."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "distance"}
        values["error"] = None if self.error is None else float(self.error)
        return {**values, "consensus_distance": self.consensus_distance}


@dataclass
class Totals:
    """Sums over all records of one kind, this worker's own side."""

    exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    allreduce_bytes: int = 0
    seconds: float = 0.0


class Monitor:
    """Keeps the last records in memory, adds up all of them, and passes each one on to sinks.

    Args:
        sinks: called with every record, on the training thread. An error in one is the caller's and is raised.
        keep: how many records stay in memory.
    """

    def __init__(self, sinks: Iterable[Callable[[RoundRecord], object]] = (), keep: int = 10_000) -> None:
        self.sinks = list(sinks)
        self.records: deque[RoundRecord] = deque(maxlen=keep)
        self.totals: dict[str, Totals] = {kind: Totals() for kind in ("gossip", "average", "gradient")}

    def emit(self, record: RoundRecord) -> None:
        """Add a record."""
        self.records.append(record)
        total = self.totals[record.kind]
        total.exchanges += 1
        total.bytes_sent += sum(record.bytes_sent.values())
        total.bytes_received += sum(record.bytes_received.values())
        total.allreduce_bytes += record.allreduce_bytes
        total.seconds += record.encode_seconds + sum(record.wait_seconds.values()) + record.decode_seconds
        for sink in self.sinks:
            sink(record)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this worker in all records."""
        return sum(total.bytes_sent for total in self.totals.values())
