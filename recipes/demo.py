"""The demo: one small transformer, real text, four workers; DDP's all-reduce next to gossip every p-th step.

    python -m decent_opt.recipes.demo                    # the table, runs/demo.png and runs/demo.json
    python -m decent_opt.recipes.demo --quick            # a few steps on two workers, to see that it works

Every row of the table is one `Row` below and runs through the training loop of `recipes.causal_lm`. All rows make the
same number of steps on the same batches with the same learning rates, which were chosen for DDP.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from decent_opt.errors import ConfigError
from decent_opt.recipes.causal_lm import Settings, train
from decent_opt.recipes.picture import draw
from decent_opt.recipes.text import load_corpus
from decent_opt.testing import RankPool

SGDM = Settings(method="ddp", optimizer="sgd", lr=0.5, batch=8, device="cpu", seed=1)
ADAMW = replace(SGDM, optimizer="adamw", lr=6e-3)


@dataclass(frozen=True)
class Row:
    """One training run.

    Attributes:
        group: rows of a group are compared with the group's first row, the all-reduce.
        name: the method, as it stands in the table.
        settings: of the run; steps, shards and the like are the demo's.
        warmup: share of the steps in which gradients are averaged.
        alone: train on one worker's shard only.
    """

    group: str
    name: str
    settings: Settings
    warmup: float = 0.0
    alone: bool = False


ROWS = (
    Row("SGDM", "DDP all-reduce", SGDM),
    Row("SGDM", "PD ring, p=8", replace(SGDM, method="pd", topology="ring")),
    Row("SGDM", "PD one-peer, p=8", replace(SGDM, method="pd", topology="one-peer-exponential")),
    Row("SGDM", "CPD sign, p=8", replace(SGDM, method="cpd", topology="ring")),
    Row("SGDM", "CPD blocks 1/8, p=8", replace(SGDM, method="cpd", topology="ring", compressor="random-blocks")),
    Row("SGDM", "one worker alone", SGDM, alone=True),
    Row("AdamW", "DDP all-reduce", ADAMW),
    Row("AdamW", "PD ring, p=8", replace(ADAMW, method="pd", topology="ring"), warmup=0.2),
    Row("AdamW", "PD one-peer, p=8", replace(ADAMW, method="pd", topology="one-peer-exponential"), warmup=0.2),
    Row("AdamW", "one worker alone", ADAMW, alone=True),
)


@dataclass(frozen=True)
class Outcome:
    """What a row measured: plain numbers. Bytes are those of the worker that sent most."""

    group: str
    name: str
    settings: Settings
    workers: int
    parameters: int
    loss: float
    curve: list[tuple[int, float, int]]  # (step, validation loss on a small sample, bytes sent by worker 0)
    bytes_sent: int
    bytes_after_warmup: int
    rounds: int
    distance: float
    seconds: float

    def allreduce_ratio(self, baseline: "Outcome") -> float:
        """How many times fewer bytes than the all-reduce this row sent in the steps after its warm-up; 0 if none."""
        steps = self.settings.steps
        counterpart = baseline.bytes_sent / steps * (steps - self.settings.warmup_steps)
        return counterpart / self.bytes_after_warmup if self.bytes_after_warmup else 0.0


def run_rows(rows: Sequence[Row], workers: int, steps: int) -> list[Outcome]:
    """Train all rows, one after the other, in one pool of processes."""
    outcomes = []
    with RankPool(timeout=600, preload=["decent_opt.recipes.causal_lm"]) as pool:
        for number, row in enumerate(rows, 1):
            settings = replace(
                row.settings,
                steps=steps,
                warmup_steps=round(row.warmup * steps),
                shards=workers,
                eval_every=max(4, steps // 12),
            )
            title = f"[{number}/{len(rows)}] {row.group + ', ' + row.name:<24}"
            size = 1 if row.alone else workers
            answers = pool.run(train_row, size, (settings, title))
            for key in ("bytes_sent", "bytes_after_warmup"):
                answers[0][key] = max(answer[key] for answer in answers)
            outcomes.append(Outcome(row.group, row.name, settings, size, **answers[0]))
    return outcomes


def train_row(rank: int, settings: Settings, title: str) -> dict[str, Any]:
    """One rank's part of a row."""
    result = train(settings, load_corpus(settings.data, settings.vocabulary), progress=title)
    return {
        "parameters": result.parameters,
        "loss": result.loss,
        "curve": result.curve,
        "bytes_sent": result.bytes_sent(),
        "bytes_after_warmup": result.bytes_sent(after=settings.warmup_steps),
        "rounds": sum(record.kind != "gradient" for record in result.records),
        "distance": result.distance,
        "seconds": result.seconds,
    }


def tabulate(outcomes: Sequence[Outcome]) -> Table:
    """The table that the demo prints."""
    first, baselines = outcomes[0], baselines_of(outcomes)
    table = Table(
        title=f"GPT-2 with {first.parameters:,} parameters, {first.workers} workers, {first.settings.steps} steps",
        caption=caption(outcomes),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("method", no_wrap=True)
    headers = ("loss", "over\nDDP", "MB in\nall", "after\nwarm-up", "share", "rounds")
    for header in (*headers, "dis-\ntance", "s"):
        table.add_column(header, justify="right", no_wrap=True)
    for outcome in outcomes:
        baseline = baselines[outcome.group]
        if outcome is baseline:
            table.add_section()
            table.add_row(f"[bold]{outcome.group}, lr {outcome.settings.lr:g}[/bold]")
        ratio = outcome.allreduce_ratio(baseline)
        table.add_row(
            outcome.name,
            f"{outcome.loss:.3f}",
            "" if outcome is baseline else f"{100 * (outcome.loss / baseline.loss - 1):+.1f}%",
            f"{outcome.bytes_sent / 1e6:.1f}",
            f"{outcome.bytes_after_warmup / 1e6:.1f}",
            f"1/{ratio:.1f}" if ratio else "0",
            f"{outcome.rounds}" if outcome.rounds else "",
            f"{outcome.distance:.2f}" if outcome.rounds else "",
            f"{outcome.seconds:.0f}",
        )
    return table


def caption(outcomes: Sequence[Outcome]) -> str:
    """What one has to know to read the table."""
    s = outcomes[0].settings
    lines = [
        f"Each worker: {s.batch} x {s.context} tokens a step of its own shard. The learning rates rise for "
        f"{s.ramp:.0%} of the steps, then fall to 0 along a cosine; the peaks were chosen for DDP. Gradients are "
        f"clipped to norm {s.clip:g}.",
        "Loss: of the workers' average, on the end of the text, which no worker trains on.",
        "MB: lengths of the buffers that a worker sent for training; the exact averages for evaluation and at the end "
        "are not in it. Share: of what the all-reduce sends in the same steps, from the end of the warm-up on.",
        "Distance: root mean square of the workers to their average, before they are averaged at the end.",
    ]
    if warmups := sorted({o.settings.warmup_steps for o in outcomes if o.settings.warmup_steps}):
        lines.append(
            f"PD with AdamW is LocalAdamW; in its warm-up, {warmups[-1]} steps, it averages gradients as DDP does."
        )
    return "\n".join(lines)


def baselines_of(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """Group -> its first row."""
    return {outcome.group: outcome for outcome in reversed(outcomes)}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All numbers, for JSON."""
    baselines = baselines_of(outcomes)
    rows = [
        {
            **asdict(outcome),
            "against_allreduce_percent": 100 * (outcome.loss / baselines[outcome.group].loss - 1),
            "allreduce_ratio": outcome.allreduce_ratio(baselines[outcome.group]),
        }
        for outcome in outcomes
    ]
    return {"torch": torch.__version__, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="demo", description="DDP next to periodic averaging with neighbours.")
    parser.add_argument("--steps", type=int, default=240, help="steps of every row (default 240)")
    parser.add_argument("--quick", action="store_true", help="16 steps on two workers, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for demo.png and demo.json (runs)")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    console = Console()
    if not console.is_terminal:
        console.width = 100
    try:
        load_corpus()  # trains the tokenizer if it is not in the cache yet, before four processes ask for it
    except ConfigError as error:
        raise SystemExit(f"demo: {error}") from error
    if options.quick:
        rows = [replace(row, settings=replace(row.settings, eval_tokens=4096)) for row in ROWS]
        outcomes = run_rows(rows, workers=2, steps=16)
    else:
        outcomes = run_rows(ROWS, workers=4, steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(outcomes, options.out / "demo.png")
    (options.out / "demo.json").write_text(json.dumps(summary(outcomes), indent=1) + "\n", "utf-8")
    console.print(tabulate(outcomes))
    console.print(f"{options.out}/demo.png and demo.json written; {time.perf_counter() - began:.0f} s in all.")


if __name__ == "__main__":
    main()
