"""How a flat vector is cut: into chunks that share a number (a scale), and these into segments that fit a cache.

Both follow from the layout and the chunk length alone, so they are part of a wire format. How many segments are
computed at a time depends on the device, and is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from decent_opt.compression.base import Layout

# Elements of a segment: 512 KiB of float32, a quarter of a core's second-level cache or less.
SEGMENT = 1 << 17
# Elements worked on at a time. A CPU's calls are cheap, but not free: four segments halve their share and still mostly
# stay in the cache. Other devices want few large calls.
AT_ONCE_ON_CPU = 4 * SEGMENT
AT_ONCE = 1 << 24
# Signs are packed 32 to a word: a segment of whole words needs no padding.
WORD = 32


@dataclass(frozen=True)
class Stretch:
    """Equal segments that follow one another.

    Attributes:
        start: their first element.
        chunk: number of their first chunk.
        segments: how many there are.
        rows: chunks of a segment.
        width: elements of a chunk.
    """

    start: int
    chunk: int
    segments: int
    rows: int
    width: int

    @property
    def size(self) -> int:
        """Elements of one segment."""
        return self.rows * self.width

    @property
    def elements(self) -> slice:
        """Where they stand in the vector."""
        return slice(self.start, self.start + self.segments * self.size)

    @property
    def chunks(self) -> slice:
        """Where their chunks stand among all chunks."""
        return slice(self.chunk, self.chunk + self.segments * self.rows)


@lru_cache(maxsize=256)
def stretches(layout: Layout, chunk: int) -> tuple[Stretch, ...]:
    """All chunks of a vector: each of `chunk` elements at most, and of whole rows or an equal part of a row.

    The last chunk of a run may be shorter; it is a stretch of its own.
    """
    found: list[Stretch] = []
    start = number = 0
    for numel, row in layout.runs:
        width = _width(row, chunk)
        whole, rest = divmod(numel, width)
        rows = _rows(width)
        for segments, height, wide in ((whole // rows, rows, width), (1, whole % rows, width), (1, 1, rest)):
            if segments * height * wide:
                found.append(Stretch(start, number, segments, height, wide))
                start, number = start + segments * height * wide, number + segments * height
    return tuple(found)


@lru_cache(maxsize=256)
def pieces(layout: Layout, chunk: int, device: str) -> tuple[Stretch, ...]:
    """The same stretches, cut to what is worked on at a time; one segment at least."""
    found: list[Stretch] = []
    for whole in stretches(layout, chunk):
        step = max(1, (AT_ONCE_ON_CPU if device == "cpu" else AT_ONCE) // whole.size)
        for first in range(0, whole.segments, step):
            found.append(
                replace(
                    whole,
                    start=whole.start + first * whole.size,
                    chunk=whole.chunk + first * whole.rows,
                    segments=min(step, whole.segments - first),
                )
            )
    return tuple(found)


def count(layout: Layout, chunk: int) -> int:
    """How many chunks there are."""
    last = stretches(layout, chunk)[-1:]
    return last[0].chunks.stop if last else 0


def longest(layout: Layout, chunk: int) -> int:
    """Elements of the longest chunk; 1 for an empty vector."""
    return max((stretch.width for stretch in stretches(layout, chunk)), default=1)


def _width(row: int, chunk: int) -> int:
    if row <= chunk:
        return chunk // row * row
    fewest = -(-row // chunk)
    # A few parts more are let pass for the sake of equal ones; a prime row is cut without regard to its ends.
    return next((row // parts for parts in range(fewest, fewest + fewest // 4 + 2) if row % parts == 0), chunk)


def _rows(width: int) -> int:
    """Chunks of a segment: as many as fit, and whole words if that is possible."""
    rows = max(1, SEGMENT // width)
    step = next(n for n in (1, 2, 4, 8, 16, 32) if n * width % WORD == 0)
    return rows - rows % step or rows
