"""A slow network: messages that arrive no sooner than some time after they were posted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from decent_opt.communication import Pending, Traffic, Transport


class Delayed:
    """A transport whose messages arrive no sooner than `delay` seconds after they were posted."""

    def __init__(self, inner: Transport, delay: float) -> None:
        self.inner, self.delay, self.rank, self.size = inner, delay, inner.rank, inner.size

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], round: int) -> Pending:
        pending, arrival = self.inner.post(sends, receives, round), time.perf_counter() + self.delay

        class Late:
            def wait(self) -> Traffic:
                began = time.perf_counter()
                time.sleep(max(0.0, arrival - began))
                late = time.perf_counter() - began
                traffic = pending.wait()
                peer = next(iter(traffic.wait_seconds))
                traffic.wait_seconds[peer] += late
                return traffic

        return Late()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
