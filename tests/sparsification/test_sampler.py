"""The sampler: how the vector is cut, how often each block comes, who draws what."""

from __future__ import annotations

import pytest
import torch

from decent_opt.errors import ConfigError
from decent_opt.sparsification import BlockSampler, Masks

MASKS: list[Masks] = ["independent", "permutation", "shared"]


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 15, 16, 17, 100, 5000, 10**6 + 7])
@pytest.mark.parametrize("tau", [1.0, 0.5, 0.25, 0.1, 1 / 128])
def test_blocks_shrink_until_there_are_enough(numel: int, tau: float) -> None:
    sampler = BlockSampler.over(numel, tau)
    m = sampler.blocks.count
    assert m >= min(numel, 4 / tau) and sampler.kept == min(m, max(1, round(tau * m)))
    assert m * 1024 >= numel  # and never grow
    if numel:
        assert sampler.scale == m / sampler.kept
    if tau == 1:
        assert sampler.kept == m


@pytest.mark.parametrize("masks", MASKS)
def test_every_block_comes_as_often_as_the_others(masks: Masks) -> None:
    sampler, steps = BlockSampler.over(100, 0.3, block=10, masks=masks), 3000  # 14 blocks of 7, 4 kept; the last of 2
    m, k = sampler.blocks.count, sampler.kept
    for rank in (0, 2):
        found = torch.zeros(m)
        for step in range(steps):
            chosen = sampler.chosen(step, rank)
            assert len(set(chosen.tolist())) == k and torch.equal(chosen, chosen.sort().values)
            found[chosen] += 1
        share = k / m
        assert float((found / steps - share).abs().max()) <= 4 * (share * (1 - share) / steps) ** 0.5


def test_workers_draw_independently_disjointly_or_the_same() -> None:
    def sets(masks: Masks, tau: float = 0.25, n: int = 4) -> list[set[int]]:
        sampler = BlockSampler.over(64, tau, block=4, masks=masks, seed=3)  # 16 blocks
        return [set(sampler.chosen(5, rank).tolist()) for rank in range(n)]

    assert len({frozenset(s) for s in sets("independent")}) > 1
    assert len({frozenset(s) for s in sets("shared")}) == 1
    assert sum(len(s) for s in sets("permutation")) == len(set().union(*sets("permutation"))) == 16
    wrapped = sets("permutation", n=6)  # more than the blocks that there are: they go round
    assert wrapped[4] == wrapped[0] and len(wrapped[5]) == 4


@pytest.mark.parametrize("masks", MASKS)
def test_a_draw_is_a_function_of_seed_step_rank_and_tensor(masks: Masks) -> None:
    def draw(seed: int = 0, step: int = 0, rank: int = 0, tensor: int = 0) -> list[int]:
        state = torch.random.get_rng_state()
        sampler = BlockSampler.over(10_000, 0.1, block=10, masks=masks, seed=seed, tensor=tensor)
        chosen = sampler.chosen(step, rank).tolist()
        assert torch.equal(torch.random.get_rng_state(), state)
        return chosen

    assert draw() == draw()
    assert draw() != draw(seed=1) and draw() != draw(step=1) and draw() != draw(tensor=1)
    assert (draw() == draw(rank=1)) == (masks == "shared")


@pytest.mark.parametrize("block", [7, 1000, (5, 1, 40, 30, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_packed_is_added_in_its_place(block: int | tuple[int, ...], dtype: torch.dtype) -> None:
    sampler = BlockSampler.over(100, 0.4, block=block)
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    seen = torch.zeros(100)
    for step in range(6):
        chosen = sampler.chosen(step, 0)
        values = torch.full((sampler.blocks.room(chosen),), 9.0, dtype=dtype)
        sampler.blocks.pack(x, chosen, values)
        q = torch.zeros(100)
        sampler.blocks.add_(q, chosen, values)
        mask = q != 0
        assert torch.equal(q, torch.where(mask, x, torch.zeros(()))) and mask.any() and not mask.all()
        acc = torch.ones(100)
        sampler.blocks.add_(acc, chosen, values, -2.0)
        assert torch.equal(acc, 1 - 2 * q)
        seen += mask
    assert not isinstance(block, tuple) or len(sampler.chosen(0, 0)) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tau": 0}, "tau: must be a number above 0 and up to 1, got 0"),
        ({"tau": 1.5}, "tau: must be a number above 0 and up to 1, got 1.5"),
        ({"tau": True}, "tau: must be a number above 0 and up to 1, got True"),
        ({"masks": "random"}, "masks: allowed are independent, permutation, shared, got 'random'"),
        ({"block": 0}, "block: must be a positive whole number of elements, or a sequence of such, got 0"),
        (
            {"block": [5, 0.5]},
            "block: must be a positive whole number of elements, or a sequence of such, got [5, 0.5]",
        ),
        ({"block": [5, 6]}, "block: the lengths have to add up to 10 elements, got a sum of 11"),
    ],
)
def test_refusals(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        BlockSampler.over(10, **{"tau": 0.5, **options})  # type: ignore[arg-type]
    assert str(error.value) == sentence
