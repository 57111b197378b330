"""Scaled sign: one bit per element, and one scale per chunk.

Signs are packed as bit planes, the layout that plain vector instructions can write and read: a segment of 32 K
elements becomes K words, and bit b of word k is the sign of element b K + k.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.compression import chunks, wire
from decent_opt.compression.base import Compressor, Key, Layout, wide
from decent_opt.compression.chunks import WORD, Stretch
from decent_opt.compression.registry import register
from decent_opt.options import whole

ONE = 0x3F800000  # 1.0 as bits; with the sign bit set, -1.0
SIGN = -(2**31)


@register
@dataclass(frozen=True)
class Sign(Compressor):
    """Q(x) = mean|x| sign(x) in each chunk (signSGD with a scale; Bernstein 2018, Karimireddy 2019).

    Contractive: in a chunk of c elements ||Q(x) - x||^2 = ||x||^2 - ||x||_1^2 / c, and ||x||_1 >= ||x||, so
    delta = 1 / c in the worst case; for Gaussian elements it is 2 / pi. Chunks of zeros come back as zeros.

    Wire: scales, one per chunk, in float32 (float64 for float64), then the words of all segments. 1 bit per element
    + 32 per chunk.
    """

    name: ClassVar[str] = "sign"
    options = (whole("chunk", 1, default=4096),)

    chunk: int = 4096

    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        return wire.length(*self._sections(layout, dtype))

    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        scales, words = wire.cut(out, *self._sections(layout, x.dtype))
        parts = chunks.pieces(layout, self.chunk, x.device.type)
        buffer = _buffer(parts, x.device)
        floats = buffer.view(torch.float32)
        magnitudes = floats if scales.dtype == torch.float32 else torch.empty_like(buffer, dtype=scales.dtype)
        bit = torch.bitwise_left_shift(1, torch.arange(WORD, dtype=torch.int32, device=x.device)).view(WORD, 1)
        begin = 0
        for part in parts:
            piece, k = x[part.elements], _words(part)
            end = begin + part.segments * k
            planes = buffer[: (end - begin) * WORD].view(part.segments, WORD, k)
            if x.dtype == torch.float32 and len(piece) == planes.numel():
                torch.bitwise_right_shift(piece.view(torch.int32).view_as(planes), 31, out=planes)
            else:
                padded = floats[: planes.numel()].view(part.segments, WORD * k)
                padded[:, : part.size].copy_(piece.view(part.segments, part.size))
                padded[:, part.size :].zero_()
                planes.bitwise_right_shift_(31)
            # The planes' bits are disjoint, so their sum is their "or", and sums are fast.
            torch.sum(planes.bitwise_and_(bit), 1, dtype=torch.int32, out=words[begin:end].view(part.segments, k))
            magnitude = magnitudes[: len(piece)]
            if x.dtype == scales.dtype:
                torch.abs(piece, out=magnitude)
            else:
                magnitude.copy_(piece).abs_()
            torch.mean(magnitude.view(-1, part.width), 1, out=scales[part.chunks])
            begin = end

    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        scales, words = wire.cut(message, *self._sections(layout, acc.dtype))
        parts = chunks.pieces(layout, self.chunk, acc.device.type)
        buffer = _buffer(parts, acc.device)
        # Brings bit b to the place of the sign.
        shift = torch.bitwise_left_shift(1, torch.arange(WORD - 1, -1, -1, dtype=torch.int32, device=acc.device))
        begin = 0
        for part in parts:
            piece, k = acc[part.elements], _words(part)
            end = begin + part.segments * k
            planes = buffer[: (end - begin) * WORD].view(part.segments, WORD, k)
            torch.mul(words[begin:end].view(part.segments, 1, k), shift.view(WORD, 1), out=planes)
            planes.bitwise_and_(SIGN).bitwise_or_(ONE)
            signs = planes.view(torch.float32).view(part.segments, WORD * k)[:, : part.size]
            total = piece.to(scales.dtype).view(-1, part.width)  # the piece itself, if it is wide enough
            total.addcmul_(signs.reshape(-1, part.width).to(scales.dtype), scales[part.chunks, None], value=weight)
            if acc.dtype != scales.dtype:
                piece.copy_(total.view(-1))
            begin = end

    def delta(self, layout: Layout) -> float:
        return 1.0 / chunks.longest(layout, self.chunk)

    def typical_delta(self, layout: Layout) -> float:
        return 2 / pi

    @property
    def gamma(self) -> float:
        return 0.4

    def _sections(self, layout: Layout, dtype: torch.dtype) -> tuple[tuple[int, torch.dtype], ...]:
        words = sum(stretch.segments * _words(stretch) for stretch in chunks.stretches(layout, self.chunk))
        return (chunks.count(layout, self.chunk), wide(dtype)), (words, torch.int32)


def _words(stretch: Stretch) -> int:
    """K, the words of one segment."""
    return -(-stretch.size // WORD)


def _buffer(parts: tuple[Stretch, ...], device: torch.device) -> Tensor:
    size = max((part.segments * _words(part) * WORD for part in parts), default=0)
    return torch.empty(size, dtype=torch.int32, device=device)
