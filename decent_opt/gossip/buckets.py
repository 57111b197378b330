"""Cut a list of tensors into flat buckets of bounded size, each of one dtype and device.

A bucket is a list of one-dimensional views of the tensors' own memory; together the buckets hold every element
exactly once. A tensor larger than the limit is cut into several pieces; small ones share a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decent_opt.errors import ConfigError

MIXABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


@dataclass
class Bucket:
    """Pieces of tensors that travel as one message.

    Attributes:
        pieces: flat tensors; all of `dtype`, on one device.
        scattered: pairs (tensor, its piece) of tensors that have no flat view of their memory: the piece is a
            copy that `write` has to bring back.
    """

    dtype: torch.dtype
    device: torch.device
    pieces: list[Tensor] = field(default_factory=list)
    scattered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    numel: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, out: Tensor) -> None:
        """Copy the pieces, one after the other, into `out` of shape (numel,), converting to its dtype."""
        if out.dtype == self.dtype:
            torch.cat(self.pieces, out=out)
        else:
            torch._foreach_copy_(list(out.split([p.numel() for p in self.pieces])), self.pieces)

    def write(self, values: Tensor) -> None:
        """Overwrite the tensors with `values` of shape (numel,), rounded to the bucket's dtype."""
        torch._foreach_copy_(self.pieces, list(values.split([p.numel() for p in self.pieces])))
        for tensor, piece in self.scattered:
            tensor.copy_(piece.view(tensor.shape))


def make_buckets(tensors: Iterable[Tensor], limit_bytes: int) -> list[Bucket]:
    """Cut tensors, in their order, into buckets of at most `limit_bytes` (at least one element).

    The cut depends only on sizes, dtypes and the order, so that every rank finds the same one.

    Args:
        tensors: of any shape, also scalar, empty and non-contiguous; real or complex floating point.
        limit_bytes: upper limit of the length of one bucket. A tensor whose elements do not lie densely in
            memory is never cut.

    Raises:
        ConfigError: a dtype cannot be mixed, or a tensor's elements share memory (an expanded tensor).
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    buckets: list[Bucket] = []
    for tensor in tensors:
        tensor = tensor.detach()
        check_mixable(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.numel() == 0:
            continue
        flat, scattered = _flatten(tensor)
        kind = (tensor.dtype, tensor.device)
        limit = max(1, limit_bytes // tensor.element_size())
        start = 0
        while start < flat.numel():
            bucket = open_buckets.get(kind)
            if bucket is None:
                bucket = open_buckets[kind] = Bucket(*kind)
                buckets.append(bucket)
            room = limit - bucket.numel
            if room <= 0 or (scattered and bucket.pieces and flat.numel() > room):
                del open_buckets[kind]
                continue
            length = flat.numel() if scattered else min(room, flat.numel() - start)
            piece = flat[start : start + length]
            bucket.pieces.append(piece)
            bucket.numel += length
            if scattered:
                bucket.scattered.append((tensor, piece))
            start += length
    return buckets


def check_mixable(tensor: Tensor, name: str = "tensor") -> None:
    """Raise `ConfigError` if averaging this tensor in place has no meaning."""
    if tensor.dtype not in MIXABLE:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in MIXABLE)
        raise ConfigError(f"{name}: dtype {tensor.dtype} cannot be averaged; allowed are {allowed}")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(f"{name}: an expanded tensor shares memory between its elements; pass a contiguous copy")


def flat_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return every piece of every tensor as flat views, uncut (for norms and copies)."""
    return [piece for bucket in make_buckets(tensors, 1 << 62) for piece in bucket.pieces]


def _flatten(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return (flat, is_copy): a view of the memory where the elements lie densely, in whatever order of dims."""
    if tensor.is_contiguous():
        return tensor.view(-1), False
    by_stride = tensor.permute(sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True))
    if by_stride.is_contiguous():
        # Transposed or channels-last: memory order is as good as any, provided that all ranks have the same
        # strides, which the layout's fingerprint compares.
        return by_stride.view(-1), False
    return tensor.reshape(-1), True
