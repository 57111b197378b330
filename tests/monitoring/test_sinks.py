"""Sinks: what they write, checked against the records that they were given."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decent_opt import PDSGDM, ConfigError
from decent_opt.monitoring import LogSummary, Prometheus, RoundRecord, TensorBoard
from decent_opt.testing import run_ranks

WORKERS, STEPS = 4, 8


def train(rank: int, make_sink: Any) -> list[RoundRecord]:
    """Warm-up (2 gradients), gossip after steps 4 and 6, an exact average after step 8."""
    optimizer = PDSGDM(
        nn.Linear(10, 3).parameters(), period=2, warmup_steps=2, global_every=3, timeout=60, sinks=[make_sink(rank)]
    )
    for _ in range(STEPS):
        optimizer.step()
    return list(optimizer.monitor.records)


def record(step: int = 10, round: int = 0, **values: Any) -> RoundRecord:
    given = {"bytes_sent": {1: 1000}, "allreduce_bytes": 1000, "wait_seconds": {1: 0.1}, **values}
    return RoundRecord("gossip", step, round, **given)


# -- log --------------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name == "decent_opt"]


def test_one_line_per_n_rounds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "decent_opt")
    clock = iter([0.0, 5.0, 5.0, 8.0, 8.0])  # made; first line; restart; second line; restart
    monkeypatch.setattr("decent_opt.monitoring.log.time.perf_counter", lambda: next(clock))
    sink = LogSummary(every=2)
    for number in range(5):
        peer = {1: 0.1} if number % 2 else {3: 0.5}
        sink(record(10 * (number + 1), number, wait_seconds=peer, distance=torch.tensor(0.25 * number)))
    first, second = lines(caplog)
    assert first.startswith("step 20, round 1: sent 0.002 MB, 0.1 of an all-reduce at every step; waited 12.0 % ")
    assert first.endswith(" of the time, longest for rank 3 (0.5 s); distance to the average 0.25")
    assert second.startswith("step 40, round 3: sent 0.002 MB, 0.1 of an all-reduce")
    assert "; waited 20.0 % of the time, " in second and second.endswith("0.75")


def test_averaged_gradients_count_but_are_no_rounds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decent_opt")
    sink = LogSummary(every=1)
    for step in (1, 2):
        sink(RoundRecord("gradient", step, -1, {-1: 1000}, {-1: 1000}, 1000, wait_seconds={-1: 2.0}))
    assert lines(caplog) == []
    sink(RoundRecord("average", 4, 0, {-1: 1000}, {-1: 1000}, 1000, wait_seconds={-1: 1.0}))
    (line,) = lines(caplog)
    assert line.startswith("step 4, round 0: sent 0.003 MB, 0.75 of an all-reduce at every step; ")
    assert line.endswith("longest for all together (5 s)")


def test_a_resumed_run_begins_at_its_first_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decent_opt")
    sink = LogSummary(every=1)
    sink(record(1000, 99))
    sink(record(1010, 100))
    (line,) = lines(caplog)
    assert line.startswith("step 1010, round 100: sent 0.001 MB, 0.1 of an all-reduce at every step; ")


def test_a_quiet_logger_reads_no_distance() -> None:
    class Unreadable(torch.Tensor):
        def __float__(self) -> float:
            raise AssertionError("the distance was read")

    logging.getLogger("decent_opt").setLevel(logging.WARNING)
    try:
        LogSummary(every=1)(record(distance=torch.zeros(()).as_subclass(Unreadable)))
    finally:
        logging.getLogger("decent_opt").setLevel(logging.NOTSET)


def test_the_log_of_a_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decent_opt")
    records = run_ranks(train, WORKERS, "loopback", (lambda rank: LogSummary(every=3) if rank == 0 else print_nothing,))
    (line,) = lines(caplog)
    sent = sum(sum(r.bytes_sent.values()) for r in records[0])
    assert line.startswith(f"step 8, round 2: sent {sent / 1e6:.4g} MB, ") and "of the time, longest for " in line


def print_nothing(record: RoundRecord) -> None:
    pass


@pytest.mark.parametrize("every", [0, -1, True, 2.5])
def test_every_is_a_count(every: Any) -> None:
    for sink in (lambda: LogSummary(every), lambda: TensorBoard(object(), every)):
        with pytest.raises(ConfigError, match=f"^every: allowed is an integer >= 1, got {every!r}$"):
            sink()


# -- TensorBoard ------------------------------------------------------------------------------------------------------


class Writer:
    """Stands for a SummaryWriter that a user brings along."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_scalars_of_a_writer_at_every_so_many_records_of_a_kind() -> None:
    writer = Writer()
    sink = TensorBoard(writer, every=2)
    for number in range(4):
        sink(record(10 * (number + 1), number, distance=torch.tensor(1.5)))
        sink(RoundRecord("gradient", 10 * (number + 1), -1))
    sink.close()  # leaves a writer alone that it has not made
    assert [step for tag, _, step in writer.scalars if tag == "decent_opt/gossip/sent_MB"] == [20, 40]
    assert {tag: value for tag, value, _ in writer.scalars if "gossip" in tag} == {
        "decent_opt/gossip/sent_MB": 0.001,
        "decent_opt/gossip/received_MB": 0.0,
        "decent_opt/gossip/of_an_all_reduce": 1.0,
        "decent_opt/gossip/encode_seconds": 0.0,
        "decent_opt/gossip/wait_seconds": 0.1,
        "decent_opt/gossip/decode_seconds": 0.0,
        "decent_opt/gossip/distance_to_average": 1.5,
    }
    assert not any("gradient" in tag and ("all_reduce" in tag or "distance" in tag) for tag, _, _ in writer.scalars)


def test_a_folder_that_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks: dict[int, TensorBoard] = {}

    def make(rank: int) -> TensorBoard:
        sinks[rank] = TensorBoard(tmp_path / str(rank))
        return sinks[rank]

    records = run_ranks(train, WORKERS, "loopback", (make,))
    for sink in sinks.values():
        sink.close()
    events = EventAccumulator(str(tmp_path / "2"))
    events.Reload()
    gossip = [r for r in records[2] if r.kind == "gossip"]
    found = events.Scalars("decent_opt/gossip/sent_MB")
    assert [(e.step, e.value) for e in found] == [
        (r.step, pytest.approx(sum(r.bytes_sent.values()) / 1e6)) for r in gossip
    ]
    distances = events.Scalars("decent_opt/gossip/distance_to_average")
    assert [e.value for e in distances] == [pytest.approx(r.consensus_distance) for r in gossip]
    assert [e.step for e in events.Scalars("decent_opt/gradient/sent_MB")] == [1, 2]
    assert [e.step for e in events.Scalars("decent_opt/average/sent_MB")] == [8]


def test_a_folder_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ConfigError, match=r"^writer: a folder needs the package tensorboard, got 'runs' \(.*monitoring"
    ):
        TensorBoard("runs")


# -- Prometheus -------------------------------------------------------------------------------------------------------


def test_ranks_share_a_registry() -> None:
    prometheus_client = pytest.importorskip("prometheus_client", reason="needs the package prometheus-client")
    registry = prometheus_client.CollectorRegistry()
    records = run_ranks(train, WORKERS, "loopback", (lambda rank: Prometheus(rank, registry),))
    for rank, own in enumerate(records):

        def value(name: str, kind: str | None = None, rank: int = rank) -> float | None:
            labels = {"rank": str(rank), **({} if kind is None else {"kind": kind})}
            found: float | None = registry.get_sample_value(f"decent_opt_{name}", labels)
            return found

        for kind in ("gossip", "average", "gradient"):
            of_kind = [r for r in own if r.kind == kind]
            assert value("exchanges_total", kind) == value("wait_seconds_count", kind) == len(of_kind) > 0
            assert value("bytes_sent_total", kind) == sum(sum(r.bytes_sent.values()) for r in of_kind)
            assert value("bytes_received_total", kind) == sum(sum(r.bytes_received.values()) for r in of_kind)
            waited = sum(sum(r.wait_seconds.values()) for r in of_kind)
            assert value("wait_seconds_sum", kind) == pytest.approx(waited)
        assert (value("step"), value("round")) == (8, 2)
        last = [r for r in own if r.kind == "gossip"][-1]
        assert value("consensus_distance") == pytest.approx(last.consensus_distance)
    assert b'decent_opt_bytes_sent_total{kind="gossip",rank="3"}' in prometheus_client.generate_latest(registry)


def test_a_new_sink_of_the_same_rank_counts_on() -> None:
    prometheus_client = pytest.importorskip("prometheus_client", reason="needs the package prometheus-client")
    registry = prometheus_client.CollectorRegistry()
    for _ in range(2):
        sink = Prometheus(0, registry)
        assert str(registry.get_sample_value("decent_opt_consensus_distance", {"rank": "0"})) == "nan"
        sink(record(distance=torch.tensor(2.0)))
        assert registry.get_sample_value("decent_opt_consensus_distance", {"rank": "0"}) == 2.0
    assert registry.get_sample_value("decent_opt_bytes_sent_total", {"rank": "0", "kind": "gossip"}) == 2000


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"^sinks: Prometheus for rank 1 needs the package prometheus-client"):
        Prometheus(1)
