"""Random blocks: contiguous blocks that sender and receivers draw from the same key, so that no index travels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression.base import Compressor, Key, Layout
from decent_opt.compression.blocks import EvenBlocks, draw, kept_of
from decent_opt.compression.registry import register
from decent_opt.options import choice, share, whole


@register
@dataclass(frozen=True)
class RandomBlocks(Compressor):
    """Q(x) keeps k = max(1, round(share * m)) of the m blocks of the vector, uniformly without replacement.

    Long blocks are fast, since a jump in memory costs more than the elements behind it; but with few of them a round
    moves large parts of the vector and leaves others alone for long. So blocks shrink until m >= 32 / share.

    Contractive, delta = k / m. With unbiased=yes what is kept is scaled by m / k: then E Q(x) = x, omega = m / k - 1.

    Wire: the chosen blocks in the dtype of x, and nothing else; the last block of the vector is padded with zeros.
    Bits: share * those of x.
    """

    name: ClassVar[str] = "random-blocks"
    options = (share("share", 0.125), whole("block", 1, default=16384), choice("unbiased", ["no", "yes"]))

    share: float = 0.125
    block: int = 16384
    unbiased: str = "no"

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        blocks = self._blocks(layout)
        return kept_of(blocks.count, self.share) * blocks.length * dtype.itemsize

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        if layout.numel:
            blocks = self._blocks(layout)
            blocks.pack(x, draw(key, blocks.count, kept_of(blocks.count, self.share)), out.view(x.dtype))

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        if layout.numel:
            blocks = self._blocks(layout)
            chosen = draw(key, blocks.count, kept_of(blocks.count, self.share))
            scale = blocks.count / len(chosen) if self.unbiased == "yes" else 1.0
            blocks.add_(acc, chosen, message.view(acc.dtype), weight * scale)

    def delta(self, layout: Layout) -> float | None:
        return None if self.unbiased == "yes" else self._kept_share(layout)

    def omega(self, layout: Layout) -> float | None:
        return 1.0 / self._kept_share(layout) - 1.0 if self.unbiased == "yes" else None

    @property
    def gamma(self) -> float:
        """Grows with the share: at 1/8 half of the edge that gossip on a ring of 8 has (0.2; `docs/theory.md`)."""
        return 0.8 * self.share if self.share < 1.0 else 1.0

    def _blocks(self, layout: Layout) -> EvenBlocks:
        return EvenBlocks.at_least(math.ceil(32 / self.share), layout.numel, self.block)

    def _kept_share(self, layout: Layout) -> float:
        """The share of the blocks that is kept, exactly."""
        count = self._blocks(layout).count
        return kept_of(count, self.share) / count if count else 1.0
