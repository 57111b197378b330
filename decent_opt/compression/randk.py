"""Random k: single elements that sender and receivers draw from the same key, so that no index travels.

Beside `random-blocks` it moves scattered elements instead of runs: slower, but no two that are kept are neighbours by
rule, so a tensor whose neighbours are alike is sampled evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression.base import Compressor, Key, Layout
from decent_opt.compression.blocks import kept_of
from decent_opt.compression.registry import register
from decent_opt.options import choice, share

# Strata that are looked at in one call: their numbers stay in the cache, where new memory for all would cost more.
SLAB = 1 << 14


@register
@dataclass(frozen=True)
class RandK(Compressor):
    """Q(x) keeps k = max(1, round(share * d)) of the d elements, one from each of k strata.

    Stratum i is [floor(i d / k), floor((i + 1) d / k)) on the vector closed to a circle and turned by a random number
    of elements, all d turns alike. Stratum i has l_i elements and gives each of them the chance 1 / l_i. It covers a
    given element in l_i of the d turns, so that element is kept with probability sum_i (l_i / d) (1 / l_i) = k / d,
    whatever the lengths are: without the turn, elements of longer strata would be kept less often than others.

    Contractive, delta = k / d. With unbiased=yes what is kept is scaled by d / k: then E Q(x) = x, omega = d / k - 1.
    Both are equalities, for all vectors.

    Wire: the chosen elements in the dtype of x, in the order of the strata, and nothing else.
    Bits: share * those of x.
    """

    name: ClassVar[str] = "randk"
    options = (share("share", 0.125), choice("unbiased", ["no", "yes"]))

    share: float = 0.125
    unbiased: str = "no"

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return self._kept(layout) * dtype.itemsize

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        if layout.numel:
            torch.index_select(x, 0, self._chosen(layout, key).to(x.device), out=out.view(x.dtype))

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        if layout.numel:
            weight = weight * layout.numel / self._kept(layout) if self.unbiased == "yes" else weight
            acc.index_add_(0, self._chosen(layout, key).to(acc.device), message.view(acc.dtype), alpha=weight)

    def delta(self, layout: Layout) -> float | None:
        return None if self.unbiased == "yes" else self._share(layout)

    def omega(self, layout: Layout) -> float | None:
        return 1.0 / self._share(layout) - 1.0 if self.unbiased == "yes" else None

    @property
    def gamma(self) -> float:
        """The law of `random-blocks`, whose delta and bits are the same; measured there, not here."""
        return 0.8 * self.share if self.share < 1.0 else 1.0

    def _share(self, layout: Layout) -> float:
        """The share of the elements that is kept, exactly."""
        return self._kept(layout) / layout.numel if layout.numel else 1.0

    def _kept(self, layout: Layout) -> int:
        return kept_of(layout.numel, self.share)

    def _chosen(self, layout: Layout, key: Key) -> Tensor:
        """Places of the elements, in the order of the strata, on the CPU: all kinds of devices find the same ones."""
        numel, k, generator = layout.numel, self._kept(layout), key.generator()
        # 62 bits, so that the remainder is as good as uniform.
        turn = int(torch.randint(1 << 62, (), generator=generator)) % numel
        uniform = torch.rand(k, generator=generator)
        length, rest = divmod(numel, k)
        places = torch.empty(k, dtype=torch.int64)
        for first in range(0, k, SLAB):
            part = slice(first, min(first + SLAB, k))
            numbers = torch.arange(part.start, part.stop + 1)
            begins = numbers * length
            if rest:  # i d / k in two terms, so that no product overflows; whole-number division is slow
                begins += (numbers * rest).div_(k, rounding_mode="floor")
            # In float64 the product stays below the length, however long the stratum is.
            within = uniform[part].double().mul_(begins.diff()).long()
            torch.add(begins[:-1], within, out=places[part])
        # Ascending, so those beyond the end of the circle are the last ones.
        passed = int(torch.searchsorted(places, numel - turn))
        places[passed:].sub_(numel)
        return places.add_(turn)
