"""Prometheus: records as metrics of `prometheus_client`, for runs that are watched from outside.

start_http_server(9100 + rank)                                          # prometheus_client's own
optimizer = PDSGDM(model.parameters(), sinks=[Prometheus(rank)])
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from decent_opt.errors import ConfigError
from decent_opt.monitoring.records import RoundRecord

# A registry refuses a metric twice, but several ranks may live in one process, or an optimizer be made anew.
_metrics: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


class Prometheus:
    """Counts and measures, labelled by rank; all but the gauges also by the kind of exchange.

        decent_opt_exchanges_total, decent_opt_bytes_sent_total, decent_opt_bytes_received_total     counters
        decent_opt_wait_seconds                                                                      histogram
        decent_opt_step, decent_opt_round, decent_opt_consensus_distance                             gauges

    The distance (this worker's, to the average; estimated as in `RoundRecord`) is read from the accelerator only when
    somebody collects the metrics.

    Args:
        rank: this worker's rank, a label.
        registry: a `CollectorRegistry`; default prometheus_client's own.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, rank: int, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError(
                f"sinks: Prometheus for rank {rank} needs the package prometheus-client, got none; "
                'run `pip install "decent-opt[monitoring]"`'
            ) from None
        self.rank = str(rank)
        with _lock:
            self._of = _metrics.setdefault(registry := registry or prometheus_client.REGISTRY, {})
            if not self._of:
                self._of.update(_make(prometheus_client, registry))
        self._distance: Tensor | None = None
        self._of["consensus_distance"].labels(self.rank).set_function(self._read_distance)

    def __call__(self, record: RoundRecord) -> None:
        """Take in a record."""
        labels = self.rank, record.kind
        self._of["exchanges"].labels(*labels).inc()
        self._of["bytes_sent"].labels(*labels).inc(sum(record.bytes_sent.values()))
        self._of["bytes_received"].labels(*labels).inc(sum(record.bytes_received.values()))
        self._of["wait_seconds"].labels(*labels).observe(sum(record.wait_seconds.values()))
        self._of["step"].labels(self.rank).set(record.step)
        if record.round >= 0:
            self._of["round"].labels(self.rank).set(record.round)
        if record.distance is not None:
            self._distance = record.distance

    def _read_distance(self) -> float:
        return float("nan") if self._distance is None else float(self._distance)


def _make(client: Any, registry: Any) -> dict[str, Any]:
    of_kind, of_rank = ("rank", "kind"), ("rank",)
    counters = {
        "exchanges": "Rounds and averaged gradients.",
        "bytes_sent": "Bytes sent by this worker.",
        "bytes_received": "Bytes received by this worker.",
    }
    gauges = {
        "step": "Optimizer steps finished.",
        "round": "Number of the last round.",
        "consensus_distance": "Estimated distance of this worker to the average of all, before the last gossip round.",
    }
    waits = client.Histogram(
        "decent_opt_wait_seconds",
        "Seconds that an exchange waited for its peers.",
        of_kind,
        registry=registry,
        buckets=[base * 10.0**power for power in range(-4, 3) for base in (1, 3)],
    )
    return {
        "wait_seconds": waits,
        **{
            name: client.Counter(f"decent_opt_{name}", text, of_kind, registry=registry)
            for name, text in counters.items()
        },
        **{name: client.Gauge(f"decent_opt_{name}", text, of_rank, registry=registry) for name, text in gauges.items()},
    }
