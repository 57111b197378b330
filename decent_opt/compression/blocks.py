"""Blocks: a flat vector cut into m contiguous pieces, some of which are packed into a message and added elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from decent_opt.compression.base import Key


def draw(key: Key, count: int, kept: int) -> Tensor:
    """`kept` of `count` block numbers, uniformly without replacement, sorted; int64 on the CPU."""
    # Drawn on the CPU, so that all kinds of devices find the same ones and the host knows them without asking.
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.randperm(count, generator=key.generator())[:kept]] = True
    return chosen.nonzero().view(-1)


def kept_of(count: int, share: float) -> int:
    """k = max(1, round(share * m)); 0 where there are no blocks."""
    return min(count, max(1, round(share * count)))


class Blocks(ABC):
    """How a vector is cut. Chosen blocks are given as sorted block numbers, int64, on the CPU."""

    count: int
    """m."""

    @abstractmethod
    def room(self, chosen: Tensor) -> int:
        """Elements that these blocks take in a message."""

    @abstractmethod
    def pack(self, x: Tensor, chosen: Tensor, out: Tensor) -> None:
        """The blocks of x, (numel,), one after the other into `out`, (room,), rounded to the dtype of `out`."""

    @abstractmethod
    def add_(self, acc: Tensor, chosen: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """acc, (numel,), gets weight times what `pack` made, in its place."""


@dataclass(frozen=True)
class EvenBlocks(Blocks):
    """Blocks of one length; the last may be shorter, and its part of a message is filled up with zeros.

    Attributes:
        numel: elements of the vector.
        length: of a block.
    """

    numel: int
    length: int

    @classmethod
    def at_least(cls, count: int, numel: int, length: int) -> EvenBlocks:
        """Blocks of this length, or as much shorter as it takes to have so many of them, as far as elements reach."""
        return cls(numel, max(1, min(length, numel // count)))

    @property
    def count(self) -> int:  # type: ignore[override]
        return -(-self.numel // self.length)

    def room(self, chosen: Tensor) -> int:
        return len(chosen) * self.length

    def pack(self, x: Tensor, chosen: Tensor, out: Tensor) -> None:
        rows = out.view(-1, self.length)
        full, inner, last = self._split(x, chosen)
        if rows.dtype == x.dtype:
            torch.index_select(full, 0, inner, out=rows[: len(inner)])
        else:
            rows[: len(inner)].copy_(full.index_select(0, inner))
        if last is not None:
            rows[-1, : len(last)].copy_(last)
            rows[-1, len(last) :].zero_()

    def add_(self, acc: Tensor, chosen: Tensor, values: Tensor, weight: float = 1.0) -> None:
        rows = values.view(-1, self.length)
        full, inner, last = self._split(acc, chosen)
        full.index_add_(0, inner, rows[: len(inner)].to(acc.dtype), alpha=weight)
        if last is not None:
            last.add_(rows[-1, : len(last)], alpha=weight)

    def _split(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """All full blocks as rows, which of them are chosen, and the short one if it is."""
        full = self.numel // self.length
        end = full * self.length
        short = len(chosen) > 0 and int(chosen[-1]) >= full  # sorted: the short block is the last
        inner = chosen[:-1] if short else chosen
        return x[:end].view(full, self.length), inner.to(x.device, non_blocking=True), x[end:] if short else None


@dataclass(frozen=True)
class UnevenBlocks(Blocks):
    """Blocks of given lengths: a block per tensor, or any other partition. For thousands of them use even ones.

    Attributes:
        lengths: in elements, in order.
    """

    lengths: tuple[int, ...]

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.lengths)

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        begins = [0]
        for length in self.lengths:
            begins.append(begins[-1] + length)
        return tuple(begins)

    def room(self, chosen: Tensor) -> int:
        return sum(self.lengths[block] for block in chosen.tolist())

    def pack(self, x: Tensor, chosen: Tensor, out: Tensor) -> None:
        for block, values in self._pieces(chosen, out):
            values.copy_(x[self._begins[block] : self._begins[block + 1]])

    def add_(self, acc: Tensor, chosen: Tensor, values: Tensor, weight: float = 1.0) -> None:
        for block, piece in self._pieces(chosen, values):
            acc[self._begins[block] : self._begins[block + 1]].add_(piece, alpha=weight)

    def _pieces(self, chosen: Tensor, values: Tensor) -> list[tuple[int, Tensor]]:
        numbers = chosen.tolist()
        return list(zip(numbers, values.split([self.lengths[block] for block in numbers]), strict=True))
