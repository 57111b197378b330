"""Random blocks: contiguous blocks that sender and receivers draw from the same key, so that no index travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression.base import Compressor, Key, Layout
from decent_opt.compression.registry import register
from decent_opt.options import choice, share, whole


@register
@dataclass(frozen=True)
class RandomBlocks(Compressor):
    """Q(x) keeps k = max(1, round(share * m)) of the m blocks of the vector, uniformly without replacement.

    Contractive, delta = k / m. With unbiased=yes what is kept is scaled by m / k: then E Q(x) = x, omega = m / k - 1.

    Wire: the chosen blocks in the dtype of x, and nothing else; the last block of the vector is padded with zeros.
    Bits: share * those of x.
    """

    name: ClassVar[str] = "random-blocks"
    options = (share("share", 0.125), whole("block", 1, default=1024), choice("unbiased", ["no", "yes"]))

    share: float = 0.125
    block: int = 1024
    unbiased: str = "no"

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return self._kept(layout) * self._length(layout) * dtype.itemsize

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        if not layout.numel:
            return
        length, chosen = self._length(layout), self._chosen(layout, key)
        rows = out.view(x.dtype).view(-1, length)
        full = layout.numel // length
        last = int(chosen[-1]) >= full  # sorted: the short block is the last
        inner = chosen[:-1] if last else chosen
        torch.index_select(x[: full * length].view(full, length), 0, inner.to(x.device), out=rows[: len(inner)])
        if last:
            rest = x[full * length :]
            rows[-1, : len(rest)].copy_(rest)
            rows[-1, len(rest) :].zero_()

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        if not layout.numel:
            return
        length, chosen = self._length(layout), self._chosen(layout, key)
        weight = weight * self._blocks(layout) / len(chosen) if self.unbiased == "yes" else weight
        rows = message.view(acc.dtype).view(-1, length)
        full = layout.numel // length
        last = int(chosen[-1]) >= full
        inner = chosen[:-1] if last else chosen
        blocks = acc[: full * length].view(full, length)
        blocks.index_add_(0, inner.to(acc.device), rows[: len(inner)], alpha=weight)
        if last:
            rest = acc[full * length :]
            rest.add_(rows[-1, : len(rest)], alpha=weight)

    def delta(self, layout: Layout) -> float | None:
        return None if self.unbiased == "yes" else self._share(layout)

    def omega(self, layout: Layout) -> float | None:
        return 1.0 / self._share(layout) - 1.0 if self.unbiased == "yes" else None

    @property
    def gamma(self) -> float:
        """Grows with the share: at 1/8 half of the edge that gossip on a ring of 8 has (0.2; `docs/theory.md`)."""
        return 0.8 * self.share if self.share < 1.0 else 1.0

    def _share(self, layout: Layout) -> float:
        """The share of the blocks that is kept, exactly."""
        return self._kept(layout) / self._blocks(layout) if layout.numel else 1.0

    def _length(self, layout: Layout) -> int:
        return max(1, min(self.block, layout.numel))

    def _blocks(self, layout: Layout) -> int:
        return -(-layout.numel // self._length(layout))

    def _kept(self, layout: Layout) -> int:
        blocks = self._blocks(layout)
        return min(blocks, max(1, round(self.share * blocks)))

    def _chosen(self, layout: Layout, key: Key) -> Tensor:
        """Numbers of the blocks, sorted, on the CPU."""
        # Drawn on the CPU, so that all kinds of devices find the same ones and the host knows them without asking.
        blocks = self._blocks(layout)
        chosen = torch.zeros(blocks, dtype=torch.bool)
        chosen[torch.randperm(blocks, generator=key.generator())[: self._kept(layout)]] = True
        return chosen.nonzero().view(-1)
