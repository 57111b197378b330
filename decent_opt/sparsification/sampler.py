"""Which m/n blocks a worker sends: k of m blocks, a pure function of (seed, step, rank), so no index is ever sent.

    P(block in U_i) = k / m  for every block,     k = max(1, round(tau m)),     E (m/k) (v)_{U_i} = v

The claim of "99% of Distributed Optimization is a Waste of Time" (arXiv 1901.09437) rests on the workers' draws being
independent: with tau = 1/n the number of iterations grows by a factor of at most 2 - 1/n, while one mask shared by all
costs a factor n. Disjoint parts of one permutation (PermK, Szlendak, Tyurin and Richtarik 2022) do better still where
all workers' vectors are alike: together they are the whole mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from decent_opt.compression.base import Key
from decent_opt.compression.blocks import Blocks, EvenBlocks, UnevenBlocks, draw, kept_of
from decent_opt.errors import ConfigError

Masks = Literal["independent", "permutation", "shared"]
_COMMON = -1  # the rank in the key of what all workers draw together


@dataclass(frozen=True)
class BlockSampler:
    """Draws of one vector's blocks.

    Attributes:
        blocks: how the vector is cut.
        kept: k.
        masks: "independent": each worker draws for itself; "permutation": the workers cut one permutation into parts of
            k, disjoint as long as n k <= m; "shared": all workers draw the same.
        seed: the run's.
        tensor: tells the vectors of one step apart.
    """

    blocks: Blocks
    kept: int
    masks: Masks = "independent"
    seed: int = 0
    tensor: int = 0

    @classmethod
    def over(
        cls,
        numel: int,
        tau: float,
        *,
        block: int | Sequence[int] = 1024,
        masks: Masks = "independent",
        seed: int = 0,
        tensor: int = 0,
    ) -> BlockSampler:
        """A sampler of the share tau of a vector.

        Args:
            numel: elements of the vector.
            tau: share of the blocks that a worker sends, in (0, 1].
            block: elements of a block, which shrinks until there are 4 / tau blocks at least; or the lengths of all
                blocks, in order.
            masks: see the class.
            seed: the run's.
            tensor: tells the vectors of one step apart.

        Raises:
            ConfigError: an option that is not allowed; lengths that do not add up to numel.
        """
        check_tau(tau)
        check_masks(masks)
        check_block(block)
        blocks: Blocks
        if isinstance(block, int):
            blocks = EvenBlocks.at_least(math.ceil(4 / tau), numel, block)
        else:
            if sum(block) != numel:
                raise ConfigError(f"block: the lengths have to add up to {numel} elements, got a sum of {sum(block)}")
            blocks = UnevenBlocks(tuple(block))
        return cls(blocks, kept_of(blocks.count, tau), masks, seed, tensor)

    @property
    def scale(self) -> float:
        """m / k, which makes what is sent unbiased."""
        return self.blocks.count / self.kept if self.kept else 1.0

    def chosen(self, step: int, rank: int) -> Tensor:
        """U_rank of this step: (k,) block numbers, sorted, int64, on the CPU."""
        m, k = self.blocks.count, self.kept
        if self.masks == "independent":
            return draw(Key(self.seed, step, rank, self.tensor), m, k)
        key = Key(self.seed, step, _COMMON, self.tensor)
        if self.masks == "shared":
            return draw(key, m, k)
        order = torch.randperm(m, generator=key.generator())
        return order[(rank * k + torch.arange(k)) % max(1, m)].sort().values

    def room(self, step: int, workers: int) -> int:
        """Elements of the largest message that any of the workers sends in this step."""
        if isinstance(self.blocks, EvenBlocks):
            return self.kept * self.blocks.length
        return max(self.blocks.room(self.chosen(step, rank)) for rank in range(workers))


def check_tau(tau: float) -> None:
    """Raise a ConfigError unless 0 < tau <= 1."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau <= 1:
        raise ConfigError(f"tau: must be a number above 0 and up to 1, got {tau!r}")


def check_masks(masks: str) -> None:
    """Raise a ConfigError for a way of drawing that does not exist."""
    if masks not in get_args(Masks):
        raise ConfigError(f"masks: allowed are {', '.join(get_args(Masks))}, got {masks!r}")


def check_block(block: int | Sequence[int]) -> None:
    """Raise a ConfigError unless it is a positive number, or lengths that are."""
    lengths = block if isinstance(block, Sequence) else [block]
    if any(isinstance(length, bool) or not isinstance(length, int) or length < 1 for length in lengths):
        raise ConfigError(f"block: must be a positive whole number of elements, or a sequence of such, got {block!r}")
