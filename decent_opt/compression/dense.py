"""Compressors that keep every element: identity, and casts to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression.base import Compressor, Key, Layout
from decent_opt.compression.registry import register


@register
@dataclass(frozen=True)
class Identity(Compressor):
    """Q(x) = x, in the dtype of x; delta = 1."""

    name: ClassVar[str] = "identity"

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return layout.numel * dtype.itemsize

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        out.view(x.dtype).copy_(x)

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        acc.add_(message.view(acc.dtype), alpha=weight)

    def delta(self, layout: Layout) -> float:
        return 1.0

    @property
    def gamma(self) -> float:
        return 1.0
