"""Compressor: Q turns a vector into bytes of a known length, and adds what bytes say to a vector.

A compressor has one of two laws, over its own randomness:

    contractive, delta in (0, 1]:    E ||Q(x) - x||^2 <= (1 - delta) ||x||^2
    unbiased, omega >= 0:            E Q(x) = x,   E ||Q(x) - x||^2 <= omega ||x||^2

Unbiased ones become contractive, delta = 1 / (1 + omega), when they are scaled by 1 / (1 + omega): `damping`.
Compressors hold no state and no tensors, so one object serves all tensors, ranks and threads.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from decent_opt.options import Option


@dataclass(frozen=True)
class Key:
    """Where all randomness of a message comes from: its receivers know it too, so no index is ever sent.

    Attributes:
        seed: the run's.
        round: number of the exchange.
        rank: the sender.
        tensor: tells the messages of one round apart.
    """

    seed: int = 0
    round: int = 0
    rank: int = 0
    tensor: int = 0

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator of its own, seeded by all four numbers; the global one is left alone."""
        packed = struct.pack("<4q", self.seed, self.round, self.rank, self.tensor)
        digest = hashlib.blake2b(packed, digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Layout:
    """What a flat vector is made of: runs of equal rows, one after the other.

    Attributes:
        runs: (elements, elements of a row) of each run; rows of 1 element where there is nothing to align to.
    """

    runs: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the vector."""
        return sum(numel for numel, _ in self.runs)

    @classmethod
    def of(cls, shape: Sequence[int]) -> Layout:
        """The layout of one tensor: a row is what belongs to one index of the first dimension."""
        return cls.join([(torch.Size(shape).numel(), row_of(shape))])

    @classmethod
    def join(cls, runs: Iterable[tuple[int, int]]) -> Layout:
        """The layout of several pieces; neighbours without rows become one run."""
        joined: list[tuple[int, int]] = []
        for numel, row in runs:
            if joined and joined[-1][1] == row == 1:
                joined[-1] = (joined[-1][0] + numel, 1)
            elif numel:
                joined.append((numel, row))
        return cls(tuple(joined))


# A tensor below this size is not worth a scale of its own: it is packed with its neighbours.
SMALL = 4096


def row_of(shape: Sequence[int]) -> int:
    """Elements of one row of a tensor; 1 for vectors and for small tensors."""
    numel = torch.Size(shape).numel()
    return numel // shape[0] if len(shape) > 1 and numel >= SMALL else 1


class Compressor(ABC):
    """One operator Q. Subclasses are frozen dataclasses whose fields are the options.

    Vectors are flat and of any floating dtype; computing is done in float32 at least. Messages are contiguous uint8
    tensors on the vector's device that begin at a multiple of 8 bytes.
    """

    name: ClassVar[str]
    """The name in the registry."""

    options: ClassVar[tuple[Option, ...]] = ()
    """What may stand after the name and a colon: a field of the class each."""

    @abstractmethod
    def nbytes(self, layout: Layout, dtype: torch.dtype) -> int:
        """Length of every message about a vector of this layout and dtype."""

    @abstractmethod
    def encode(self, x: Tensor, layout: Layout, out: Tensor, key: Key) -> None:
        """Fill `out`, (nbytes,) uint8, with Q(x); x, (numel,), is left as it is."""

    @abstractmethod
    def decode_add_(self, acc: Tensor, layout: Layout, message: Tensor, weight: float, key: Key) -> None:
        """acc <- acc + weight Q(x), (numel,), of the dtype that x had; `key` is the sender's."""

    def delta(self, layout: Layout) -> float | None:
        """delta of a contractive operator, the worst case over all vectors; None for an unbiased one."""
        return None

    def omega(self, layout: Layout) -> float | None:
        """omega of an unbiased operator, the worst case over all vectors; None for a contractive one."""
        return None

    def typical_delta(self, layout: Layout) -> float:
        """delta on vectors with independent Gaussian elements; what theory may count on in training."""
        delta = self.delta(layout)
        return self.damping(layout) if delta is None else delta

    def damping(self, layout: Layout) -> float:
        """The factor that makes Q contractive: 1, or 1 / (1 + omega)."""
        omega = self.omega(layout)
        return 1.0 if omega is None else 1.0 / (1.0 + omega)

    @property
    @abstractmethod
    def gamma(self) -> float:
        """Consensus step size to begin with in CPD-SGDM."""

    @property
    def spec(self) -> str:
        """The text that makes it: name:option=value,..."""
        given = ",".join(f"{o.key}={getattr(self, o.key)}" for o in self.options)
        return f"{self.name}:{given}" if given else self.name

    def bits(self, layout: Layout, dtype: torch.dtype = torch.float32) -> float:
        """Bits per element that are sent."""
        return 8 * self.nbytes(layout, dtype) / max(1, layout.numel)

    def compress(self, x: Tensor, key: Key = Key()) -> Tensor:
        """Q(x) of one tensor of any shape, as a new message."""
        layout = Layout.of(x.shape)
        out = torch.empty(self.nbytes(layout, x.dtype), dtype=torch.uint8, device=x.device)
        self.encode(x.detach().reshape(-1), layout, out, key)
        return out

    def decompress(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Key = Key()) -> Tensor:
        """What a message of `compress` says, as a tensor of this shape and dtype."""
        layout = Layout.of(shape)
        acc = torch.zeros(layout.numel, dtype=dtype, device=message.device)
        self.decode_add_(acc, layout, message, 1.0, key)
        return acc.view(tuple(shape))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
