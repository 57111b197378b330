"""Top-k per block: the largest elements of each block, with the narrowest index that a place in a block needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression import wire
from decent_opt.compression.base import Compressor, Key, Layout
from decent_opt.compression.registry import register
from decent_opt.errors import ConfigError
from decent_opt.options import share, whole

# Blocks that are looked at in one call: a few megabytes, so that the magnitudes stay in the cache.
ROWS = 1024


@register
@dataclass(frozen=True)
class TopK(Compressor):
    """Q(x) keeps the k = max(1, round(share * block)) elements of largest magnitude in each block; the last is shorter.

    Contractive: what is kept is at least the average, so delta = min k / length over the blocks. Among equals any k.

    Wire: values in the dtype of x, then their places in the block in 1 byte (blocks up to 256) or 2.
    """

    name: ClassVar[str] = "topk"
    options = (share("share", 0.01), whole("block", 1, default=1024))

    share: float = 0.01
    block: int = 1024

    def __post_init__(self) -> None:
        if self.block > 1 << 16:
            raise ConfigError(f"compressor: block of topk must be a whole number up to 65536, got {self.block}")

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return wire.length(*self._sections(layout, dtype))

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        values, places = wire.cut(out, *self._sections(layout, x.dtype))
        for begin, rows, width, at, k in self._slabs(x):
            blocks = x[begin : begin + rows * width].view(rows, width)
            chosen = torch.topk(blocks.abs(), k, dim=1, sorted=False).indices
            torch.gather(blocks, 1, chosen, out=values[at : at + rows * k].view(rows, k))
            # int16 holds the 2-byte place as it is; the upper half is negative and comes back by the mask.
            places[at : at + rows * k].copy_(chosen.view(-1))

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        values, places = wire.cut(message, *self._sections(layout, acc.dtype))
        for begin, rows, width, at, k in self._slabs(acc):
            blocks = acc[begin : begin + rows * width].view(rows, width)
            chosen = places[at : at + rows * k].view(rows, k).long().bitwise_and_(0xFFFF)
            blocks.scatter_add_(1, chosen, values[at : at + rows * k].view(rows, k) * weight)

    def delta(self, layout: Layout) -> float:
        whole, rest = divmod(layout.numel, self.block)
        kept = [self._k(n) / n for n in [self.block] * (whole > 0) + [rest] * (rest > 0)]
        return min(kept, default=1.0)

    @property
    def gamma(self) -> float:
        return step_size(self.share)

    def _k(self, length: int) -> int:
        return max(1, round(self.share * length))

    def _sections(self, layout: Layout, dtype: torch.dtype) -> tuple[tuple[int, torch.dtype], ...]:
        whole, rest = divmod(layout.numel, self.block)
        kept = whole * self._k(self.block) + (self._k(rest) if rest else 0)
        return (kept, dtype), (kept, torch.uint8 if self.block <= 256 else torch.int16)

    def _slabs(self, x: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
        """(first element, blocks, their length, first place in the message, k), slab after slab."""
        whole, rest = divmod(x.numel(), self.block)
        step = ROWS if x.device.type == "cpu" else max(1, whole)
        at, k = 0, self._k(self.block)
        for row in range(0, whole, step):
            rows = min(step, whole - row)
            yield row * self.block, rows, self.block, at, k
            at += rows * k
        if rest:
            yield whole * self.block, 1, rest, at, self._k(rest)


def step_size(share: float) -> float:
    """gamma: 0.15 at a share of 10 %, 0.03 at 1 %, a power law through them; 0.35 at 10 % explodes on a ring of 8."""
    return min(0.4, 0.03 * (share / 0.01) ** 0.7)
