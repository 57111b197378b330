"""m/n blocks of gradients on a small transformer: the DDP hook next to DDP's all-reduce, on 4 ranks of this machine.

    python benchmarks/blocks_transformer.py run [--seeds 1 2 3]   # skips what is in results/blocks_transformer.jsonl
    python benchmarks/blocks_transformer.py table                 # the table of docs/blocks.md

The demo's GPT-2 and text, tau = 1/4, 600 steps of 2 x 64 tokens per worker, so that the noise of a worker's gradient
matters and averaging it pays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from decent_opt.recipes.causal_lm import Settings
from decent_opt.recipes.demo import Row, run_rows
from decent_opt.recipes.text import load_corpus

RESULTS = Path(__file__).parent / "results" / "blocks_transformer.jsonl"
STEPS, WORKERS = 600, 4
SETTINGS = Settings(method="ddp", batch=2, device="cpu")
BASES = {
    "SGD, lr 0.5": replace(SETTINGS, optimizer="sgd", momentum=0.0, lr=0.5),
    "SGD, momentum 0.9, lr 0.1": replace(SETTINGS, optimizer="sgd", lr=0.1),
    **{f"AdamW, lr {lr:g}": replace(SETTINGS, optimizer="adamw", lr=lr) for lr in (0.001, 0.002, 0.004)},
}


def rows(seed: int) -> Iterator[Row]:
    """All runs with one seed."""
    for name, base in BASES.items():
        base = replace(base, seed=seed)
        blocks = replace(base, method="blocks", tau=0.25)
        yield Row(name, "all-reduce", base)
        yield Row(name, "error feedback", blocks)
        yield Row(name, "error feedback, warm-up 20 %", blocks, warmup=0.2)
        yield Row(name, "unbiased", replace(blocks, estimator="unbiased"))
        yield Row(name, "control variate", replace(blocks, estimator="control_variate"))
        yield Row(name, "one worker alone", base, alone=True)


def run(seeds: list[int]) -> None:
    """Train what is not in the results yet."""
    load_corpus()
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    done = {(line["base"], line["method"], line["seed"]) for line in map(json.loads, lines)}
    missing = [row for seed in seeds for row in rows(seed) if (row.group, row.name, row.settings.seed) not in done]
    for row in missing:
        (outcome,) = run_rows([row], WORKERS, STEPS)
        entry = {"base": row.group, "method": row.name, "seed": row.settings.seed}
        measured = {"loss": outcome.loss, "bytes_sent": outcome.bytes_sent, "seconds": round(outcome.seconds, 1)}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, **measured}) + "\n")


def table() -> None:
    """Means over the seeds."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for line in map(json.loads, RESULTS.read_text("utf-8").splitlines()):
        found.setdefault(line["base"], {}).setdefault(line["method"], []).append(line)
    out = Table("", "method", "seeds", "validation loss", "over all-reduce", "below one alone", "MB sent per worker")
    for base, methods in found.items():
        if not {"all-reduce", "one worker alone"} <= methods.keys():
            continue
        losses = {method: mean(line["loss"] for line in lines) for method, lines in methods.items()}
        dense, alone = losses["all-reduce"], losses["one worker alone"]
        for method, lines in methods.items():
            loss, sent = losses[method], mean(line["bytes_sent"] for line in lines) / 1e6
            over, below = f"{100 * (loss / dense - 1):+.1f} %", f"{100 * (1 - loss / alone):.1f} %"
            out.add_row(base, method, str(len(lines)), f"{loss:.3f}", over, below, f"{sent:.0f}")
    Console(width=120).print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.seeds)
    table()


if __name__ == "__main__":
    main()
