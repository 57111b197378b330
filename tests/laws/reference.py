"""Every operator once more, from its formula and element by element: slow, obvious, and without the fast one's code.

    Q(x) = REFERENCES[compressor.name](x, compressor, key)

`x` is a numpy array of float32 or float64. What is drawn at random comes from the key's generator in the order in
which the operator draws it, because that is part of what sender and receivers agree on; all else is independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decent_opt.compression import Key

Array = NDArray[Any]
Reference = Callable[[Array, Any, Key], Array]


def identity(x: Array, _: Any, key: Key) -> Array:
    return x.copy()


def bf16(x: Array, _: Any, key: Key) -> Array:
    """To the nearest number whose float32 ends in 16 zero bits; from the middle to the one that ends in 17."""
    out = np.zeros(x.size)
    for i, value in enumerate(x.reshape(-1)):
        bits = int(np.float32(value).view(np.uint32))
        upper, lower = bits >> 16, bits & 0xFFFF
        if lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1):
            upper += 1
        out[i] = np.uint32(upper << 16).view(np.float32)
    return out.reshape(x.shape)


def fp16(x: Array, _: Any, key: Key) -> Array:
    """s times the nearest multiple of the unit in the last place: 11 bits, and no place below 2^-24."""
    out = np.zeros(x.size)
    scale = max((abs(value) for value in x.reshape(-1)), default=x.dtype.type(0))
    for i, value in enumerate(x.reshape(-1)):
        if scale > 0:
            ratio = float(np.float32(value / scale))  # the division in the dtype of x; casts start from float32
            unit = 2.0 ** max(np.frexp(ratio)[1] - 11, -24)
            out[i] = round(ratio / unit) * unit * float(scale)  # `round` goes from the middle to the even one
    return out.reshape(x.shape)


def chunks(shape: tuple[int, ...], longest: int) -> list[tuple[int, int]]:
    """(begin, end) of each chunk: whole rows, or an equal part of a row; elements where there are no rows."""
    numel = int(np.prod(shape))
    row = numel // shape[0] if len(shape) > 1 and numel >= 4096 else 1
    if row <= longest:
        length = longest - longest % row
    else:
        fewest = (row + longest - 1) // longest
        equal = [parts for parts in range(fewest, fewest + fewest // 4 + 2) if row % parts == 0]
        length = row // equal[0] if equal else longest
    return [(begin, min(begin + length, numel)) for begin in range(0, numel, length)]


def sign(x: Array, compressor: Any, key: Key) -> Array:
    flat, out = x.reshape(-1).astype(np.float64), np.zeros(x.size)
    for begin, end in chunks(x.shape, compressor.chunk):
        mean = sum(abs(flat[i]) for i in range(begin, end)) / (end - begin)
        for i in range(begin, end):
            out[i] = -mean if np.signbit(flat[i]) else mean
    return out.reshape(x.shape)


def keep_largest(flat: Array, out: Array, begin: int, end: int, share: float) -> None:
    by_magnitude = sorted(range(begin, end), key=lambda i: -abs(flat[i]))
    for i in by_magnitude[: max(1, round(share * (end - begin)))]:
        out[i] = flat[i]


def topk(x: Array, compressor: Any, key: Key) -> Array:
    out = np.zeros(x.size)
    for begin in range(0, x.size, compressor.block):
        keep_largest(x.reshape(-1), out, begin, min(begin + compressor.block, x.size), compressor.share)
    return out.reshape(x.shape)


def topk_global(x: Array, compressor: Any, key: Key) -> Array:
    out = np.zeros(x.size)
    keep_largest(x.reshape(-1), out, 0, x.size, compressor.share)
    return out.reshape(x.shape)


def random_blocks(x: Array, compressor: Any, key: Key) -> Array:
    """The first k numbers of a random order of the blocks."""
    out, flat = np.zeros(x.size), x.reshape(-1)
    length = max(1, min(compressor.block, x.size // ceil(32 / compressor.share)))
    begins = list(range(0, x.size, length))
    kept = max(1, round(compressor.share * len(begins)))
    scale = len(begins) / kept if compressor.unbiased == "yes" else 1.0
    order = torch.randperm(len(begins), generator=key.generator()).tolist()
    for number in order[:kept]:
        for i in range(begins[number], min(begins[number] + length, x.size)):
            out[i] = scale * flat[i]
    return out.reshape(x.shape)


def randk(x: Array, compressor: Any, key: Key) -> Array:
    """One element of each stratum of the turned circle."""
    out, flat, numel, generator = np.zeros(x.size), x.reshape(-1), x.size, key.generator()
    kept = max(1, round(compressor.share * numel))
    scale = numel / kept if compressor.unbiased == "yes" else 1.0
    turn = int(torch.randint(1 << 62, (), generator=generator))
    uniform = torch.rand(kept, generator=generator).tolist()
    for i in range(kept):
        begin, end = i * numel // kept, (i + 1) * numel // kept
        place = (begin + floor(uniform[i] * (end - begin)) + turn) % numel
        out[place] = scale * flat[place]
    return out.reshape(x.shape)


def segments(shape: tuple[int, ...], longest: int) -> Iterator[list[tuple[int, int]]]:
    """Chunks that are computed together: up to 131072 elements, in whole words of 32; a shorter last chunk is alone."""
    found = chunks(shape, longest)
    length = found[0][1] - found[0][0]
    per_segment = max(1, 131072 // length)
    while per_segment * length % 32 and any(n * length % 32 == 0 for n in range(1, per_segment)):
        per_segment -= 1
    short = [found.pop()] if found[-1][1] - found[-1][0] < length else []
    for first in range(0, len(found), per_segment):
        yield found[first : first + per_segment]
    if short:
        yield short


def quantized(x: Array, compressor: Any, key: Key) -> Array:
    """(m / s) floor(s x / m + u) in each chunk; the same numbers u for every segment from its beginning."""
    flat, out, levels = x.reshape(-1).astype(np.float64), np.zeros(x.size), 2 ** (compressor.bits_per_element - 1) - 1
    room = 1 - 4 * np.finfo(x.dtype).eps  # so that rounding never lifts m over the last level
    drawn = torch.rand(min(131072, x.size), generator=key.generator(), dtype=torch.from_numpy(x[:0]).dtype).tolist()
    for segment in segments(x.shape, compressor.chunk):
        start = segment[0][0]
        for begin, end in segment:
            largest = max(abs(flat[i]) for i in range(begin, end))
            for i in range(begin, end):
                if largest > 0:
                    out[i] = largest / levels * floor(room * levels * flat[i] / largest + drawn[i - start])
    return out.reshape(x.shape)


REFERENCES: dict[str, Reference] = {
    "identity": identity,
    "bf16": bf16,
    "fp16": fp16,
    "sign": sign,
    "topk": topk,
    "topk-global": topk_global,
    "random-blocks": random_blocks,
    "randk": randk,
    "int8": quantized,
    "int4": quantized,
    "int2": quantized,
}
