"""Compressors that keep every element: identity, and casts to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression import wire
from decent_opt.compression.base import Compressor, Key, Layout, wide
from decent_opt.compression.registry import register

# Elements that are widened at a time: they stay in the cache, where a mixed-dtype addition would leave the fast path.
AT_A_TIME = 1 << 18


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


@register
@dataclass(frozen=True)
class BFloat16(Compressor):
    """Q(x) = x rounded to bfloat16; 16 bits per element.

    A value is off by 2^-8 of itself at most (half a unit in the last of 8 bits), so delta = 1 - 2^-16; below the
    smallest normal of float32 the error is absolute.
    """

    name: ClassVar[str] = "bf16"

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return 2 * layout.numel

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        out.view(torch.bfloat16).copy_(x)

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        for part, piece in _widened(acc, message.view(torch.bfloat16), wide(acc.dtype)):
            part.add_(piece, alpha=weight)

    def delta(self, layout: Layout) -> float:
        return 1.0 - 2.0**-16

    @property
    def gamma(self) -> float:
        return 1.0


@register
@dataclass(frozen=True)
class Float16(Compressor):
    """Q(x) = s * (x / s rounded to float16), s = max|x| of the message; 16 bits per element and one scale.

    Nothing becomes infinite, whatever its size. A value is off by 2^-11 of itself or, below 2^-14 s, by 2^-25 s; with
    d elements ||Q(x) - x||^2 <= (2^-22 + d 2^-50) ||x||^2.

    Wire: s in float32 (float64 for float64), then the elements.
    """

    name: ClassVar[str] = "fp16"

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return wire.length(*self._sections(layout, dtype))

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        scale, halves = wire.cut(out, *self._sections(layout, x.dtype))
        if not layout.numel:
            scale.zero_()
            return
        low, high = torch.aminmax(x)
        scale.copy_(torch.maximum(high, -low))
        divisor = torch.where(scale > 0, scale, 1.0)
        step = _step(x)
        buffer = torch.empty(min(step, layout.numel), dtype=scale.dtype, device=x.device)
        for begin in range(0, layout.numel, step):
            part = x[begin : begin + step]
            halves[begin : begin + step].copy_(torch.div(part, divisor, out=buffer[: len(part)]))

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        scale, halves = wire.cut(message, *self._sections(layout, acc.dtype))
        for part, piece in _widened(acc, halves, scale.dtype):
            part.add_(piece.mul_(scale), alpha=weight)

    def delta(self, layout: Layout) -> float:
        return 1.0 - 2.0**-21 - layout.numel * 2.0**-48

    @property
    def gamma(self) -> float:
        return 1.0

    def _sections(self, layout: Layout, dtype: torch.dtype) -> tuple[tuple[int, torch.dtype], ...]:
        return (1, wide(dtype)), (layout.numel, torch.float16)


def _step(x: Tensor) -> int:
    return AT_A_TIME if x.device.type == "cpu" else max(1, x.numel())


def _widened(acc: Tensor, narrow: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of acc, and those of `narrow` in a wider dtype: one buffer, since a fresh one costs its page faults."""
    step = _step(acc)
    buffer = torch.empty(min(step, len(acc)), dtype=dtype, device=acc.device)
    for begin in range(0, len(acc), step):
        part = narrow[begin : begin + step]
        yield acc[begin : begin + step], buffer[: len(part)].copy_(part)
