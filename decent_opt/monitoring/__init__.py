"""Per-round records of bytes, seconds and consensus distance, and where they go."""

from decent_opt.monitoring.log import LogSummary
from decent_opt.monitoring.prometheus import Prometheus
from decent_opt.monitoring.records import Monitor, RoundRecord, Totals
from decent_opt.monitoring.sinks import JsonLines
from decent_opt.monitoring.tensorboard import TensorBoard

__all__ = ["JsonLines", "LogSummary", "Monitor", "Prometheus", "RoundRecord", "TensorBoard", "Totals"]
