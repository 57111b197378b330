"""Top-k of the whole vector: the largest elements wherever they are, with two bytes for the place of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression import wire
from decent_opt.compression.base import Compressor, Key, Layout
from decent_opt.compression.blocks import kept_of
from decent_opt.compression.registry import register
from decent_opt.compression.topk import step_size
from decent_opt.options import share

# Elements that 2 bytes can tell apart.
PAGE = 1 << 16
# Elements that the threshold is estimated from. A vector of twice as many is searched as a whole, which is as fast.
SAMPLE = 1 << 16
# How far below its estimate the threshold is put, in standard deviations: one estimate in three millions is too high.
SLACK = 5.0
# Elements compared at a time on a CPU: they stay in the cache. A multiple of 8, for masks are read by words.
SLAB = 1 << 18
ALL_SMALL = 0x0101010101010101  # 8 times True


@register
@dataclass(frozen=True)
class TopKGlobal(Compressor):
    """Q(x) keeps the k = max(1, round(share * d)) elements of largest magnitude of all d; among equals any k.

    Contractive: what is kept is at least the average, so delta = k / d. Beside `topk` it keeps more of ||x||^2 where
    some tensors of the vector are larger than others, and nothing at all of the smaller ones.

    Wire: values in the dtype of x by ascending place; the low 16 bits of their places; how many there are in each page
    of 65536 elements, in 4 bytes. Bits: share * (those of x + 16), and 32 per page.
    """

    name: ClassVar[str] = "topk-global"
    options = (share("share", 0.01),)

    share: float = 0.01

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return wire.length(*self._sections(layout, dtype))

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        values, lows, counts = wire.cut(out, *self._sections(layout, x.dtype))
        places = _largest(x, self._kept(layout), key)
        torch.index_select(x, 0, places, out=values)
        # int16 holds the low bits as they are; the upper half is negative and comes back by the mask.
        lows.copy_(places)
        pages = torch.arange(0, (len(counts) + 1) * PAGE, PAGE, device=x.device)
        counts.copy_(torch.searchsorted(places, pages).diff())

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        values, lows, counts = wire.cut(message, *self._sections(layout, acc.dtype))
        pages = torch.arange(0, len(counts) * PAGE, PAGE, device=acc.device)
        places = pages.repeat_interleave(counts, output_size=len(lows)).add_(lows.long().bitwise_and_(PAGE - 1))
        acc.index_add_(0, places, values, alpha=weight)

    def delta(self, layout: Layout) -> float:
        return self._kept(layout) / layout.numel if layout.numel else 1.0

    @property
    def gamma(self) -> float:
        """The rule of `topk`; measured there, not here."""
        return step_size(self.share)

    def _kept(self, layout: Layout) -> int:
        return kept_of(layout.numel, self.share)

    def _sections(self, layout: Layout, dtype: torch.dtype) -> tuple[tuple[int, torch.dtype], ...]:
        kept = self._kept(layout)
        return (kept, dtype), (kept, torch.int16), (-(-layout.numel // PAGE), torch.int32)


def _largest(x: Tensor, k: int, key: Key) -> Tensor:
    """Places of the k elements of largest magnitude, ascending."""
    if x.device.type != "cpu":
        return torch.topk(x.abs(), k, sorted=False).indices.sort().values
    candidates = _candidates(x, k, key)
    magnitudes = x.abs() if candidates is None else x[candidates].abs_()
    chosen = torch.zeros(len(magnitudes), dtype=torch.bool)
    chosen[torch.topk(magnitudes, k, sorted=False).indices] = True
    places = chosen.nonzero().view(-1)  # ascending without a sort, which would cost more than the choice itself
    return places if candidates is None else candidates[places]


def _candidates(x: Tensor, k: int, key: Key) -> Tensor | None:
    """Ascending places that hold the k largest and few others; None if all elements have to be looked at."""
    numel = len(x)
    expected = SAMPLE * k / max(1, numel)  # of the k largest in the sample
    rank = round(expected + SLACK * (expected + 1) ** 0.5)
    if numel <= 2 * SAMPLE or not 0 < rank < SAMPLE:
        return None
    # At random rather than evenly spaced: a step in common with the rows of a matrix would see a few columns only.
    sample = x[torch.randint(numel, (SAMPLE,), generator=key.generator())].abs_()
    threshold = float(torch.topk(sample, rank).values[-1])
    found = _at_least(x, threshold) if threshold > 0 else []  # at zero everything is a candidate
    return torch.cat(found) if sum(map(len, found)) >= k else None


def _at_least(x: Tensor, threshold: float) -> list[Tensor]:
    """Ascending places of |x_i| >= threshold and of NaN, which `torch.topk` takes for the largest, slab by slab."""
    magnitude, small = torch.empty(SLAB, dtype=x.dtype), torch.ones(SLAB, dtype=torch.bool)
    found = []
    for begin in range(0, len(x), SLAB):
        part = x[begin : begin + SLAB]
        small[len(part) :] = True
        torch.lt(torch.abs(part, out=magnitude[: len(part)]), threshold, out=small[: len(part)])
        # Few of 8 neighbours have a candidate among them, and `nonzero` reads words as fast as single bytes.
        words = small.view(torch.int64).ne(ALL_SMALL).nonzero().view(-1)
        word, within = small.view(-1, 8)[words].logical_not_().nonzero().unbind(1)
        found.append(words[word].mul_(8).add_(within).add_(begin))
    return found
