"""The demo in its quick form, and the arithmetic of its table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from decent_opt.recipes.causal_lm import Settings
from decent_opt.recipes.demo import ROWS, Outcome, main, tabulate


def outcome(name: str, **values: object) -> Outcome:
    plain = {
        **{"group": "SGDM", "name": name, "settings": Settings(steps=240), "workers": 4, "parameters": 10},
        **{"loss": 5.0, "curve": [(0, 6.0, 0)], "bytes_sent": 0, "bytes_after_warmup": 0, "rounds": 0},
        **{"distance": 0.0, "seconds": 1.0},
    }
    return Outcome(**{**plain, **values})  # type: ignore[arg-type]


def test_the_ratio_counts_the_steps_after_the_warmup() -> None:
    baseline = outcome("DDP", bytes_sent=2400)
    gossip = outcome(
        "PD", settings=Settings(steps=240, warmup_steps=48), bytes_sent=800, bytes_after_warmup=320, loss=5.1
    )
    assert gossip.allreduce_ratio(baseline) == pytest.approx(10 * 192 / 320)
    assert outcome("alone").allreduce_ratio(baseline) == 0.0
    text = io.StringIO()
    Console(file=text, width=140).print(tabulate([baseline, gossip, outcome("alone")]))
    (line,) = [line for line in text.getvalue().splitlines() if " PD " in line]
    assert "5.100" in line
    assert "+2.0%" in line
    assert "1/6.0" in line


def test_rows_of_a_group_share_learning_rate_schedule_and_data() -> None:
    for row in ROWS:
        first = next(other for other in ROWS if other.group == row.group)
        assert first.settings.method == "ddp"
        for name in ("lr", "ramp", "clip", "weight_decay", "steps", "batch", "seed", "optimizer", "width"):
            assert getattr(row.settings, name) == getattr(first.settings, name)


def test_the_quick_demo_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for row in ROWS:
        assert row.name in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "demo.json").read_text("utf-8"))["rows"]
    assert [(n["group"], n["name"]) for n in numbers] == [(row.group, row.name) for row in ROWS]
    by_name = {(n["group"], n["name"]): n for n in numbers}
    assert by_name["SGDM", "DDP all-reduce"]["parameters"] > 400_000
    # Two workers: an all-reduce sends the model at every step; a ring sends it, and headers, at steps 8 and 16.
    for group, steps in (("SGDM", 16), ("AdamW", 13)):  # AdamW: after a warm-up of 3
        assert 0.99 * steps / 2 < by_name[group, "PD ring, p=8"]["allreduce_ratio"] < steps / 2
        assert by_name[group, "one worker alone"]["bytes_sent"] == 0
