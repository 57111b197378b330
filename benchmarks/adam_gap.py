"""How far local AdamW is behind DDP's AdamW, by the rule for the second moment: what LocalAdamW's defaults rest on.

    python benchmarks/adam_gap.py run [--seeds 0 1 2] [--only GROUP ...]   appends to benchmarks/results/adam_gap.jsonl
    python benchmarks/adam_gap.py table                                    prints it

n virtual workers (loopback) on a ring train a GPT-2 on their own shards of the embedded text, period 8, 160 steps of 4
or 8 windows of 64 tokens, AdamW with a cosine schedule at a peak learning rate of 6e-3, the best for DDP of 6e-3, 8e-3
and 1e-2 at n = 4. The loss is that of the workers' average on 32768 validation tokens. Every run that is in the file
already is skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from decent_opt import Decentralized, LocalAdamW
from decent_opt.recipes.causal_lm import Settings, learning_rate
from decent_opt.recipes.models import new_model
from decent_opt.recipes.text import Corpus, batch, load_corpus
from decent_opt.testing import run_ranks, seeded

RESULTS = Path(__file__).parent / "results" / "adam_gap.jsonl"
STEPS, CONTEXT, PERIOD, VALIDATION_TOKENS = 160, 64, 8, 32768
RUN = Settings(steps=STEPS, lr=6e-3, ramp=0.1)


@dataclass(frozen=True)
class Case:
    """One run. `rule` is "ddp", "plain" (AdamW in Decentralized, no warm-up) or a rule of LocalAdamW."""

    rule: str
    n: int
    batch: int = 4
    warmup: float = 0.3
    outer: float = 0.5
    seed: int = 0


def cases(seed: int) -> Iterator[tuple[str, Case]]:
    """(group, case): the groups can be run one by one."""
    for windows in (4, 8):
        for n in (4, 8, 2, 16):
            group = f"n{n} b{windows}"
            yield group, Case("ddp", n, windows, 0.0, 0.0, seed)
            yield group, Case("plain", n, windows, 0.0, 0.0, seed)
            for rule in ("trend", "frozen", "refreshed"):
                yield group, Case(rule, n, windows, seed=seed)
    for n in (8, 4):
        for rule in ("trend", "frozen") if n == 8 else ("trend",):
            for warmup in (0.1, 0.2, 0.3):
                for outer in (0.0, 0.5, 0.65):
                    yield f"grid n{n}", Case(rule, n, 4, warmup, outer, seed)


def work(rank: int, case: Case, corpus: Corpus) -> dict[str, float]:
    """Train one worker; rank 0 evaluates."""
    with seeded(case.seed):
        model = new_model("gpt2", layers=2, width=64, heads=4, context=CONTEXT, tokenizer=corpus.tokenizer)
    optimizer = make(case, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, RUN))
    shard = corpus.shard(rank, case.n)
    for step in range(STEPS):
        ids = batch(shard, case.seed, rank, step, case.batch, CONTEXT)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.consensus_()
    if rank:
        return {}
    totals = optimizer.monitor.totals
    after_warmup = [r for r in optimizer.monitor.records if r.kind == "gradient" and r.step > case.warmup * STEPS]
    return {
        "loss": evaluate(model, corpus),
        "gossip_bytes": totals["gossip"].bytes_sent,
        "refresh_bytes": sum(sum(r.bytes_sent.values()) for r in after_warmup) if case.rule == "refreshed" else 0,
    }


def make(case: Case, model: nn.Module) -> Decentralized:
    """The optimizer of a case. A warm-up that never ends is DDP."""
    parameters: Any = model.parameters()
    if case.rule in ("ddp", "plain"):
        base = torch.optim.AdamW(parameters, lr=RUN.lr)
        return Decentralized(base, period=PERIOD, warmup_steps=STEPS if case.rule == "ddp" else 0)
    return LocalAdamW(
        parameters, lr=RUN.lr, warmup_steps=round(case.warmup * STEPS), second_moment=case.rule,  # type: ignore[arg-type]
        outer_momentum=case.outer, period=PERIOD,
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> float:
    """Mean loss over evenly spread validation windows."""
    windows = corpus.validation_windows(CONTEXT, VALIDATION_TOKENS)
    parts = [(float(model(input_ids=w, labels=w, use_cache=False).loss), len(w)) for w in windows.split(32)]
    return sum(loss * count for loss, count in parts) / len(windows)


def run(seeds: list[int], only: list[str]) -> None:
    """Run what is not in the file yet."""
    corpus = load_corpus()
    done = {tuple(asdict(case).values()) for case, _ in load()}
    RESULTS.parent.mkdir(exist_ok=True)
    for seed in seeds:
        for group, case in cases(seed):
            if (only and group not in only) or tuple(asdict(case).values()) in done:
                continue
            done.add(tuple(asdict(case).values()))
            began = time.perf_counter()
            result = run_ranks(work, case.n, "loopback", (case, corpus), timeout=3600)[0]
            result["seconds"] = round(time.perf_counter() - began, 1)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(case), **result}) + "\n")
            print(case, result, flush=True)


def load() -> list[tuple[Case, dict[str, float]]]:
    """The runs in the file."""
    if not RESULTS.exists():
        return []
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    names = asdict(Case("", 0))
    return [(Case(**{k: row[k] for k in names}), {k: v for k, v in row.items() if k not in names}) for row in rows]


def table() -> None:
    """Print, for each setting, the loss behind DDP in percent: mean over the seeds, and its standard error."""
    rows = load()
    ddp = {(c.n, c.batch, c.seed): r["loss"] for c, r in rows if c.rule == "ddp"}
    gaps: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for case, result in rows:
        reference = ddp.get((case.n, case.batch, case.seed))
        if reference is not None:
            key = (case.batch, case.n, case.rule, case.warmup, case.outer)
            gaps[key].append(100 * (result["loss"] / reference - 1))
    shown = Table("batch", "n", "rule", "warm-up", "outer", "behind DDP, %", "s.e.", "seeds")
    for key, values in sorted(gaps.items()):
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        batch_size, n, rule, warmup, outer = key
        shown.add_row(
            str(batch_size), str(n), rule, f"{warmup:.0%}", f"{outer:g}", f"{statistics.mean(values):+.2f}",
            f"{error:.2f}", str(len(values)),
        )  # fmt: skip
    Console().print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run what is missing")
    runner.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runner.add_argument("--only", nargs="+", default=[], help='groups such as "n8 b4" or "grid n8"')
    commands.add_parser("table", help="print the results")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.seeds, arguments.only)
    else:
        table()


if __name__ == "__main__":
    main()
