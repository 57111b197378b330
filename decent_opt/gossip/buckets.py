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

    A 16-bit tensor may have a remainder, what its value lacks to a float32 one: then the bucket's values are
    tensor + remainder, and writing splits them again, so that nothing is lost to rounding.

    Attributes:
        pieces: flat tensors; all of `dtype`, on one device.
        remainders: one flat float32 tensor per piece; or none.
        spans: for each piece (index of the tensor, first element, end).
        scattered: pairs (tensor, its piece) of tensors that have no flat view of their memory: the piece is a
            copy that `write` has to bring back.
    """

    dtype: torch.dtype
    device: torch.device
    pieces: list[Tensor] = field(default_factory=list)
    remainders: list[Tensor] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    scattered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    numel: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return self.numel * self.dtype.itemsize

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device, bool]:
        """Buckets of one kind can use the same buffers."""
        return self.dtype, self.device, bool(self.remainders)

    def read(self, out: Tensor) -> None:
        """Copy the values, one piece after the other, into `out` of shape (numel,), converting to its dtype."""
        self._refresh()
        if out.dtype == self.dtype and not self.remainders:
            torch.cat(self.pieces, out=out)
            return
        parts = self.split(out)
        torch._foreach_copy_(parts, self.pieces)
        if self.remainders and out.dtype == self.wide:
            torch._foreach_add_(parts, self.remainders)

    def write(self, values: Tensor) -> None:
        """Overwrite the tensors with `values` of shape (numel,); what rounding cuts off goes to the remainders."""
        parts = self.split(values)
        torch._foreach_copy_(self.pieces, parts)
        if self.remainders:
            torch._foreach_copy_(self.remainders, parts)
            torch._foreach_sub_(self.remainders, self.pieces)
        for tensor, piece in self.scattered:
            tensor.copy_(piece.view(tensor.shape))

    def add(self, correction: Tensor) -> None:
        """x <- x + correction, of shape (numel,) and dtype `wide`; the correction is used up."""
        self._refresh()
        parts = self.split(correction)
        torch._foreach_add_(parts, self.pieces)
        if self.remainders:
            torch._foreach_add_(parts, self.remainders)
        self.write(correction)

    def blank_(self, where: Tensor) -> None:
        """x <- 0, and its remainder, where `where`, (), bool, holds; the host is not stopped."""
        blank_([*self.pieces, *self.remainders, *(tensor for tensor, _ in self.scattered)], where)

    def _refresh(self) -> None:
        for tensor, piece in self.scattered:
            piece.view(tensor.shape).copy_(tensor)  # it may have moved since the bucket was made

    def split(self, values: Tensor) -> list[Tensor]:
        """Views of a flat tensor of shape (numel,), one per piece."""
        return list(values.split([piece.numel() for piece in self.pieces]))


def make_buckets(
    tensors: Iterable[Tensor],
    limit_bytes: int,
    remainders: Iterable[Tensor | None] | None = None,
    rows: Iterable[int] | None = None,
) -> list[Bucket]:
    """Cut tensors, in their order, into buckets of at most `limit_bytes` (at least one element).

    The cut depends only on sizes, dtypes and the order, so that every rank finds the same one.

    Args:
        tensors: of any shape, also scalar, empty and non-contiguous; real or complex floating point.
        limit_bytes: upper limit of the length of one bucket. A tensor whose elements do not lie densely in
            memory is never cut.
        remainders: for each tensor its remainder, of the same shape and memory order, or None.
        rows: for each tensor the elements of a row; a cut falls between rows where a whole row fits.

    Raises:
        ConfigError: a dtype cannot be mixed, or a tensor's elements share memory (an expanded tensor).
    """
    open_buckets: dict[object, Bucket] = {}
    buckets: list[Bucket] = []
    tensors = list(tensors)
    companions = list(remainders) if remainders is not None else [None] * len(tensors)
    grains = list(rows) if rows is not None else [1] * len(tensors)
    for index, (tensor, remainder, grain) in enumerate(zip(tensors, companions, grains, strict=True)):
        check_mixable(tensor)
        flat, is_copy = flatten(tensor)
        if flat.numel() == 0:
            continue
        flat_remainder = flatten(remainder)[0] if remainder is not None else None
        kind = (flat.dtype, flat.device, remainder is not None)
        limit = max(1, limit_bytes // flat.element_size())
        start = 0
        while start < flat.numel():
            bucket = open_buckets.get(kind)
            if bucket is None:
                bucket = open_buckets[kind] = Bucket(flat.dtype, flat.device)
                buckets.append(bucket)
            room = limit - bucket.numel
            room = room // grain * grain or (room if grain > limit else 0)
            if room <= 0 or (is_copy and bucket.pieces and flat.numel() > room):
                del open_buckets[kind]
                continue
            stop = flat.numel() if is_copy else min(start + room, flat.numel())
            piece = flat[start:stop]
            bucket.pieces.append(piece)
            bucket.spans.append((index, start, stop))
            bucket.numel += stop - start
            if flat_remainder is not None:
                bucket.remainders.append(flat_remainder[start:stop])
            if is_copy:
                real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
                bucket.scattered.append((real, piece))
            start = stop
    return buckets


def blank_(tensors: Sequence[Tensor], where: Tensor) -> None:
    """x <- 0 where `where`, (), bool, holds; the host is not stopped."""
    if where.device.type != "cpu":
        for tensor in tensors:
            torch.where(where, torch.zeros((), dtype=tensor.dtype, device=tensor.device), tensor, out=tensor)
    elif where:
        torch._foreach_zero_(list(tensors))


def check_mixable(tensor: Tensor, name: str = "tensor") -> None:
    """Raise `ConfigError` if averaging this tensor in place has no meaning."""
    if tensor.dtype not in MIXABLE:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in MIXABLE)
        raise ConfigError(f"{name}: dtype {tensor.dtype} cannot be averaged; allowed are {allowed}")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(f"{name}: an expanded tensor shares memory between its elements; pass a contiguous copy")


def flatten(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return (flat, is_copy): a view of the memory where the elements lie densely, in whatever order of dims."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1), False
    by_stride = tensor.permute(sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True))
    if by_stride.is_contiguous():
        # Transposed or channels-last: memory order is as good as any, provided that all ranks have the same
        # strides, which the layout's fingerprint compares.
        return by_stride.view(-1), False
    return tensor.reshape(-1), True
