"""Per-round records of bytes, seconds and consensus distance, and where they go."""

from decent_opt.monitoring.records import Monitor, RoundRecord, Totals
from decent_opt.monitoring.sinks import JsonLines

__all__ = ["JsonLines", "Monitor", "RoundRecord", "Totals"]
