"""How fast a compressor is here, as a ratio to copying the same vector in the same run: 1 is the speed of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from decent_opt.compression.base import Compressor, Key, Layout


@dataclass(frozen=True)
class Speed:
    """Seconds of the fastest of some interleaved runs over float32 elements.

    Attributes:
        copy: `Tensor.copy_`, the unit.
        encode: to bytes.
        decode: and added to a vector with a weight.
        nbytes: length of the message.
    """

    copy: float
    encode: float
    decode: float
    nbytes: int

    @property
    def encode_ratio(self) -> float:
        """Speed of encoding; 1: as fast as a copy."""
        return self.copy / self.encode

    @property
    def decode_ratio(self) -> float:
        """Speed of decode-accumulate."""
        return self.copy / self.decode


def measure(compressor: Compressor, elements: int, repeats: int = 5, width: int = 1024) -> Speed:
    """Time a compressor on a Gaussian matrix of `width` columns, on one thread of the CPU."""
    rows = elements // width
    layout = Layout.of((rows, width))
    x = torch.randn(rows * width, generator=torch.Generator().manual_seed(0))
    target, acc = torch.empty_like(x), torch.zeros_like(x)
    message = torch.empty(compressor.nbytes(layout, x.dtype), dtype=torch.uint8)
    runs: list[Callable[[], object]] = [
        lambda: target.copy_(x),
        lambda: compressor.encode(x, layout, message, Key()),
        lambda: compressor.decode_add_(acc, layout, message, 0.3, Key()),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = [float("inf")] * len(runs)
        for _ in range(repeats + 1):  # the first run warms up, and is never the fastest
            for index, run in enumerate(runs):
                began = time.perf_counter()
                run()
                best[index] = min(best[index], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    copy, encode, decode = best
    return Speed(copy, encode, decode, message.numel())
