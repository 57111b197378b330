"""Whatever the shapes, dtypes, memory orders and limits: buckets hold every element exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decent_opt import ConfigError
from decent_opt.gossip import make_buckets

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "offset"]))
    if layout == "sliced":
        return torch.zeros([2 * s for s in shape], dtype=dtype)[tuple(slice(None, None, 2) for _ in shape) or ...]
    if layout == "transposed":
        return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1])
    if layout == "offset" and shape:
        return torch.zeros([shape[0] + 1, *shape[1:]], dtype=dtype)[1:]
    return torch.zeros(shape, dtype=dtype)


@settings(max_examples=300, deadline=None)
@given(st.lists(tensors(), max_size=6), st.integers(1, 200))
def test_every_element_is_read_and_written_once(items: list[Tensor], limit: int) -> None:
    buckets = make_buckets(items, limit)
    for bucket in buckets:
        values = torch.empty(bucket.numel, dtype=torch.float64)
        bucket.read(values)
        bucket.write(values + 1)
        assert bucket.numel == sum(p.numel() for p in bucket.pieces) > 0
        assert bucket.nbytes <= max(limit, bucket.dtype.itemsize) or len(bucket.pieces) == 1 == len(bucket.scattered)
        assert all(p.dtype == bucket.dtype for p in bucket.pieces)
    # Complex numbers are pairs of reals, and both halves are written.
    assert all(bool((item == (1 + 1j if item.is_complex() else 1)).all()) for item in items)


@settings(max_examples=100, deadline=None)
@given(st.lists(tensors(), max_size=6), st.integers(1, 200))
def test_pieces_come_in_the_same_order_everywhere(items: list[Tensor], limit: int) -> None:
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in items]
    shape_of = [[p.numel() for p in b.pieces] for b in make_buckets(items, limit)]
    assert shape_of == [[p.numel() for p in b.pieces] for b in make_buckets(copies, limit)]


def test_bytes_are_read_as_they_are() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6.0, 10.0)
    first, second = make_buckets([a, b], limit_bytes=32)
    out = torch.empty(8)
    first.read(out)
    assert out.tolist() == list(range(8)) and second.numel == 2
    first.write(torch.zeros(8))
    assert not a.any() and b.tolist() == [0.0, 0.0, 8.0, 9.0]


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype torch\.int64 cannot be averaged; allowed are float64"):
        make_buckets([torch.zeros(3, dtype=torch.int64)], 100)
    with pytest.raises(ConfigError, match="an expanded tensor shares memory"):
        make_buckets([torch.zeros(1).expand(3)], 100)
