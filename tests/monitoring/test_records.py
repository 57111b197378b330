from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from decent_opt import PDSGDM, JsonLines, RoundRecord
from decent_opt.gossip.message import HEADER_BYTES
from decent_opt.testing import RankPool


def train(rank: int, folder: str) -> tuple[list[RoundRecord], list[RoundRecord], int, int]:
    called: list[RoundRecord] = []
    optimizer = PDSGDM(
        nn.Linear(10, 3).parameters(), period=2, warmup_steps=2, global_every=3, timeout=60,
        sinks=[called.append, JsonLines(Path(folder) / f"rounds.{rank}.jsonl")],
    )  # fmt: skip
    for _ in range(8):
        optimizer.step()
    return called, list(optimizer.monitor.records), optimizer.monitor.bytes_sent, optimizer.decent_round


def test_records_reach_memory_file_and_callable(ranks: RankPool, tmp_path: Path) -> None:
    called, kept, total, rounds = ranks.run(train, 4, (str(tmp_path),))[2]
    assert rounds == 3
    model = 33 * 4
    assert [(r.kind, r.step, r.round) for r in kept] == [
        ("gradient", 1, -1), ("gradient", 2, -1), ("gossip", 4, 0), ("gossip", 6, 1), ("average", 8, 2),
    ]  # fmt: skip
    gossip = kept[2]
    assert gossip.bytes_sent == gossip.bytes_received == {1: model + HEADER_BYTES, 3: model + HEADER_BYTES}
    assert set(gossip.wait_seconds) == {1, 3} and gossip.encode_seconds > 0 and gossip.decode_seconds > 0
    assert all(r.allreduce_bytes == 2 * 3 * model // 4 for r in kept[2:])
    flag = 4  # of the one bucket: are its values finite?
    assert kept[4].bytes_sent == {-1: 2 * 3 * (model + flag) // 4}
    assert total == sum(sum(r.bytes_sent.values()) for r in kept)
    lines = [json.loads(line) for line in (tmp_path / "rounds.2.jsonl").read_text().splitlines()]
    assert [r.as_dict() | {"bytes_sent": {}} for r in called] == [
        {**line, "bytes_sent": {}, "bytes_received": r.bytes_received, "wait_seconds": r.wait_seconds}
        for line, r in zip(lines, kept, strict=True)
    ]
    assert lines[2]["bytes_sent"] == {"1": model + HEADER_BYTES, "3": model + HEADER_BYTES}


def test_the_distance_is_read_lazily() -> None:
    assert RoundRecord("gossip", 1, 0).consensus_distance is None
    assert RoundRecord("gossip", 1, 0, distance=torch.tensor(2.5)).consensus_distance == 2.5
