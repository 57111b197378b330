"""LogSummary: one line per N rounds through `logging`, for people who watch a run."""

from __future__ import annotations

import logging
import time
from collections import Counter

from decent_opt.monitoring.records import RoundRecord
from decent_opt.monitoring.sinks import checked_every

logger = logging.getLogger("decent_opt")


class LogSummary:
    """Logs what the last N rounds cost.

        step 80, round 10: sent 1.3 MB, 0.12 of an all-reduce at every step; waited 4.0 % of the time, longest for
        rank 3 (0.012 s); distance to the average 0.53

    MB, waiting and its share of the wall-clock time cover everything since the last line, averaged gradients too. The
    distance is that of the last record, estimated as in `RoundRecord`; reading it waits for the accelerator once.

    Args:
        every: N, rounds per line.
        level: of `logging`, at which the logger "decent_opt" gets the line.

    Raises:
        ConfigError: `every` is no integer >= 1.
    """

    def __init__(self, every: int = 100, level: int = logging.INFO) -> None:
        self.every, self.level = checked_every(every), level
        self._step: int | None = None  # at the last line; None before the first record
        self._restart()

    def __call__(self, record: RoundRecord) -> None:
        """Take in a record; log if it completes N rounds."""
        if self._step is None:
            self._step = _begin(record)
            if self._step == record.step:
                return  # a run that goes on: how many steps led to this exchange is not known
        self._sent += sum(record.bytes_sent.values())
        self._waits.update(record.wait_seconds)
        if record.kind == "gradient":
            return
        self._rounds += 1
        if self._rounds < self.every:
            return
        if logger.isEnabledFor(self.level):
            logger.log(self.level, self._line(record, self._step))
        self._step = record.step
        self._restart()

    def _restart(self) -> None:
        self._began = time.perf_counter()
        self._sent = self._rounds = 0
        self._waits: Counter[int] = Counter()  # seconds per peer

    def _line(self, record: RoundRecord, since: int) -> str:
        line = f"step {record.step}, round {record.round}: sent {self._sent / 1e6:.4g} MB"
        if all_reduce := record.allreduce_bytes * (record.step - since):
            line += f", {self._sent / all_reduce:.2g} of an all-reduce at every step"
        share = sum(self._waits.values()) / max(time.perf_counter() - self._began, 1e-9)
        line += f"; waited {100 * share:.1f} % of the time"
        if self._waits:
            peer, seconds = self._waits.most_common(1)[0]
            line += f", longest for {'all together' if peer < 0 else f'rank {peer}'} ({seconds:.3g} s)"
        if (distance := record.consensus_distance) is not None:
            line += f"; distance to the average {distance:.3g}"
        return line


def _begin(record: RoundRecord) -> int:
    """The step before which nothing counts, as far as a first record tells."""
    if record.kind == "gradient":
        return record.step - 1
    return 0 if record.round == 0 else record.step
