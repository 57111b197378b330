"""Where records go besides memory. A sink is any callable that takes a `RoundRecord`."""

from __future__ import annotations

import json
from pathlib import Path

from decent_opt.errors import ConfigError
from decent_opt.monitoring.records import RoundRecord


class JsonLines:
    """Appends each record to a file as one line of JSON.

    Args:
        path: the file; give each rank its own, for example ``f"rounds.{rank}.jsonl"``. Folders are made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: RoundRecord) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_dict()) + "\n")


def checked_every(every: int) -> int:
    """Return it if a sink can write every so many records."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every: allowed is an integer >= 1, got {every!r}")
    return every
