"""m/n blocks with error feedback train a small transformer as the all-reduce does, and better than one worker alone.

Longer runs, other optimizers and learning rates, where it does not hold: benchmarks/blocks_transformer.py.
"""

from __future__ import annotations

from dataclasses import replace

from decent_opt.recipes.causal_lm import Settings, train
from decent_opt.recipes.text import load_corpus
from decent_opt.testing import RankPool

SETTINGS = Settings(
    method="ddp", optimizer="sgd", momentum=0.0, lr=0.7, steps=500, batch=1, context=16, layers=1, width=64,
    device="cpu", seed=1, shards=4, eval_every=0, eval_tokens=16384,
)  # fmt: skip


def loss_of(rank: int, settings: Settings) -> tuple[float, int]:
    result = train(settings, load_corpus(), progress=None)
    return result.loss, result.bytes_sent()


def test_a_quarter_of_the_blocks_with_error_feedback(ranks: RankPool) -> None:
    load_corpus()
    dense, dense_bytes = ranks.run(loss_of, 4, (SETTINGS,))[0]
    blocks, blocks_bytes = ranks.run(loss_of, 4, (replace(SETTINGS, method="blocks", tau=0.25),))[0]
    alone, _ = ranks.run(loss_of, 1, (SETTINGS,))[0]
    assert blocks < 1.03 * dense
    assert blocks < 0.95 * alone
    assert blocks_bytes < 0.51 * dense_bytes
