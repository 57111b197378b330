"""Stochastic quantisation to 8, 4 or 2 bits, unbiased, with a scale per chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression import chunks, wire
from decent_opt.compression.base import Compressor, Key, Layout, wide
from decent_opt.compression.registry import register
from decent_opt.options import whole

NOISE = 1 << 17
# The largest value is put so many units of rounding below the last level that u and the rounding of sums never lift it
# over. So Q(x) is unbiased up to a factor of 1 - 2^-21 in float32, which is in the order of its rounding.
ROOM = 4


class _Quantizer(Compressor):
    """Q(x) = (m / s) floor(s x / m + u), m = max|x| of the chunk, s = 2^(bits - 1) - 1, u uniform in [0, 1).

    Unbiased (QSGD, Alistarh 2017, with the largest magnitude in place of the norm). The step is m / s, and a rounding
    with fraction f has the variance f (1 - f) (m / s)^2, at most a quarter step^2 and at most |x_i| m / s. With
    m <= ||x|| and sum |x_i| <= sqrt(c) ||x||: omega = min(c / (4 s^2), sqrt(c) / s) for chunks of c elements.

    The numbers u of one message are drawn once for 131072 elements and used again for the next as many: that far apart
    the roundings of two elements are not independent. Each element is unbiased all the same.

    Wire: scales m, one per chunk, in float32 (float64 for float64), then the levels, packed: byte j of a segment of
    M bytes holds the elements j, M + j, ... from its low bits up.
    """

    bits_per_element: ClassVar[int]
    chunk: int

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return wire.length(*self._sections(layout, dtype))

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        scales, packed = wire.cut(out, *self._sections(layout, x.dtype))
        noise = torch.rand(
            min(NOISE, max(1, layout.numel)), generator=key.generator(x.device), dtype=scales.dtype, device=x.device
        )
        levels, limits = self.levels, torch.finfo(scales.dtype)
        # Levels are sent as whole numbers from 0 on, rounded down by a cast.
        noise.add_(levels)
        parts = chunks.pieces(layout, self.chunk, x.device.type)
        room = max((part.segments * part.size for part in parts), default=0)
        shifted = torch.empty(room, dtype=noise.dtype, device=x.device)
        whole = torch.empty_like(shifted, dtype=torch.int32)
        begin = 0
        for part in parts:
            values = x[part.elements].to(scales.dtype).view(part.segments, part.rows, part.width)
            scale = scales[part.chunks].view(part.segments, part.rows)
            torch.maximum(values.amax(2), -values.amin(2), out=scale)  # ten times as fast as `aminmax` along a dim
            # A scale that has no reciprocal is zero as far as the dtype can tell.
            factor = torch.where(scale > levels / limits.max, levels * (1 - ROOM * limits.eps) / scale, 0.0)
            u = noise[: part.size].view(part.rows, part.width)
            size = values.numel()
            torch.addcmul(u, values, factor[:, :, None], out=shifted[:size].view_as(values))
            end = begin + part.segments * self._bytes(part.size)
            # By way of int32: a cast of floats to bytes is slow.
            q = whole[:size].copy_(shifted[:size])
            self._pack(q.view(part.segments, -1), packed[begin:end].view(part.segments, -1))
            begin = end

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        scales, packed = wire.cut(message, *self._sections(layout, acc.dtype))
        parts = chunks.pieces(layout, self.chunk, acc.device.type)
        # One buffer for all: a fresh one costs its page faults.
        room = max((part.segments * part.size for part in parts), default=0)
        buffer = torch.empty(room, dtype=scales.dtype, device=acc.device)
        begin = 0
        for part in parts:
            end = begin + part.segments * self._bytes(part.size)
            levels = self._unpack(packed[begin:end].view(part.segments, -1))[:, : part.size]
            q = buffer[: levels.numel()].view_as(levels).copy_(levels).sub_(float(self.levels)).view(-1, part.width)
            step = scales[part.chunks, None] * (weight / self.levels)
            total = acc[part.elements].view(-1, part.width)
            if acc.dtype == scales.dtype:
                total.addcmul_(q, step)
            else:
                total.add_(q * step)
            begin = end

    def omega(self, layout: Layout) -> float:
        c = chunks.longest(layout, self.chunk)
        return float(min(c / (4 * self.levels**2), c**0.5 / self.levels))

    @property
    def gamma(self) -> float:
        """1, and 0.3 with 2 bits: where gossip on a ring of 8 is fastest; all are stable up to 1 (`docs/theory.md`)."""
        return 1.0 if self.bits_per_element > 2 else 0.3

    @property
    def levels(self) -> int:
        """s, the levels on each side of zero."""
        return int(2 ** (self.bits_per_element - 1) - 1)

    def _bytes(self, elements: int) -> int:
        return -(-elements * self.bits_per_element // 8)

    def _pack(self, q: Tensor, out: Tensor) -> None:
        """Levels (segments, elements), int32, into bytes (segments, bytes)."""
        length = out.shape[1]
        out.copy_(q[:, :length])
        for place in range(1, 8 // self.bits_per_element):
            plane = q[:, place * length : (place + 1) * length].to(torch.uint8)
            out[:, : plane.shape[1]].bitwise_or_(plane << (place * self.bits_per_element))

    def _unpack(self, packed: Tensor) -> Tensor:
        """Bytes (segments, bytes) to levels, uint8 (segments, elements and what fills up the last bytes)."""
        per_byte, mask = 8 // self.bits_per_element, 2**self.bits_per_element - 1
        planes = [(packed >> (place * self.bits_per_element)) & mask for place in range(per_byte)]
        return torch.cat(planes, 1) if per_byte > 1 else packed

    def _sections(self, layout: Layout, dtype: torch.dtype) -> tuple[tuple[int, torch.dtype], ...]:
        packed = sum(s.segments * self._bytes(s.size) for s in chunks.stretches(layout, self.chunk))
        return (chunks.count(layout, self.chunk), wide(dtype)), (packed, torch.uint8)


@register
@dataclass(frozen=True)
class Int8(_Quantizer):
    """8 bits: s = 127."""

    name: ClassVar[str] = "int8"
    options = (whole("chunk", 1, default=1024),)
    bits_per_element: ClassVar[int] = 8
    chunk: int = 1024


@register
@dataclass(frozen=True)
class Int4(_Quantizer):
    """4 bits: s = 7."""

    name: ClassVar[str] = "int4"
    options = (whole("chunk", 1, default=128),)
    bits_per_element: ClassVar[int] = 4
    chunk: int = 128


@register
@dataclass(frozen=True)
class Int2(_Quantizer):
    """2 bits: s = 1, the signs of some and zeros."""

    name: ClassVar[str] = "int2"
    options = (whole("chunk", 1, default=64),)
    bits_per_element: ClassVar[int] = 2
    chunk: int = 64
