"""The buckets of an interrupted run, for the first backward pass after it.

Blocks are drawn over a bucket. DDP makes new buckets after its first backward pass, from the order in which gradients
were ready, so a resumed run would go through one pass with other buckets than the run that was never stopped, and draw
other blocks. In that pass buckets that differ are held until the last of them has come, and what they hold is exchanged
as if it had come in the old ones.
"""

# No `from __future__ import annotations` here: it is imported by modules of hooks.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from decent_opt.errors import ConfigError

Gradient = torch.futures.Future[Tensor]
Start = Callable[["Bucket"], Gradient]


class Bucket(Protocol):
    """What a hook asks of DDP's buckets."""

    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def buffer(self) -> Tensor: ...
    def parameters(self) -> list[Tensor]: ...


@dataclass
class BucketAsSaved:
    """A bucket of the old run, filled from those of this one."""

    place: int
    last: bool
    values: Tensor
    members: list[Tensor]

    def index(self) -> int:
        return self.place

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self.values

    def parameters(self) -> list[Tensor]:
        return self.members


@dataclass
class BucketLayout:
    """Which parameters stand in which bucket.

    Attributes:
        now: of this backward pass, or of the last one: a list of parameter numbers per bucket. It is what to save.
        saved: of the run that was interrupted, until the first backward pass is over; else None.
    """

    now: list[list[int]] = field(default_factory=list)
    saved: list[list[int]] | None = None
    _held: list[tuple[Bucket, "torch.futures.Future[Tensor | Exception]"]] = field(default_factory=list)

    def start(self, bucket: Bucket, numbers: Sequence[int], start: Start) -> Gradient:
        """`start(bucket)`, or a future of the same bucket if it has to be held.

        Args:
            bucket: of this backward pass.
            numbers: of its parameters, in its order.
            start: begins the exchange of a bucket.
        """
        if bucket.index() == 0:
            self.now, self._held = [], []
        self.now.append(list(numbers))
        place = bucket.index()
        fits = self.saved is None or (place < len(self.saved) and self.saved[place] == self.now[-1])
        if fits and not self._held:
            if bucket.is_last():
                self.saved = None
            return start(bucket)
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        outcome: torch.futures.Future[Tensor | Exception] = torch.futures.Future(devices=devices)
        self._held.append((bucket, outcome))
        if bucket.is_last():
            self._exchange(start)
        return outcome.then(unwrap)

    def _exchange(self, start: Start) -> None:
        """Exchange what is held in the old buckets; fulfil the futures of the new ones when all are done."""
        held, saved = self._held, self.saved
        assert saved is not None
        self._held, self.saved = [], None
        first = len(self.now) - len(held)
        slices: dict[int, tuple[Tensor, Tensor]] = {}
        for (bucket, _), numbers in zip(held, self.now[first:], strict=True):
            parameters = bucket.parameters()
            parts = bucket.buffer().split([p.numel() for p in parameters])
            slices.update(zip(numbers, zip(parameters, parts, strict=True), strict=True))
        if sorted(slices) != sorted(number for numbers in saved[first:] for number in numbers):
            raise ConfigError("model: the saved state has other parameters in its buckets than this model")
        filled: list[tuple[list[Tensor], Tensor]] = []
        futures: list[Gradient] = []
        for place in range(first, len(saved)):
            members = [slices[number] for number in saved[place]]
            values = torch.cat([part for _, part in members])
            filled.append(([part for _, part in members], values))
            last = place == len(saved) - 1
            futures.append(start(BucketAsSaved(place, last, values, [p for p, _ in members])))

        def finish(done: Any) -> None:
            try:
                done.wait()  # raises what went wrong
                for (parts, _), future in zip(filled, futures, strict=True):
                    values = future.value()
                    for part, value in zip(parts, values.split([part.numel() for part in parts]), strict=True):
                        part.copy_(value)
                for bucket, outcome in held:
                    outcome.set_result(bucket.buffer())
            except Exception as error:
                for _, outcome in held:
                    if not outcome.done():
                        outcome.set_result(error)

        torch.futures.collect_all(futures).add_done_callback(finish)


def unwrap(outcome: "torch.futures.Future[Tensor | Exception]") -> Tensor:
    """The value of a future, or the error that it holds, raised: `Future.set_exception` is known to Python alone."""
    value = outcome.value()
    if isinstance(value, Exception):
        raise value
    return value
