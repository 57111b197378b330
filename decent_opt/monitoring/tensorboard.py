"""TensorBoard: records as scalars, with `torch.utils.tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decent_opt.errors import ConfigError
from decent_opt.monitoring.records import RoundRecord
from decent_opt.monitoring.sinks import checked_every


class TensorBoard:
    """Writes scalars "decent_opt/<kind>/...", by training step: MB sent and received, the ratio to an all-reduce,
    seconds of encoding, waiting and decoding, and the distance to the average.

    Args:
        writer: a `SummaryWriter`, or the folder for one (then `close` it); give each rank its own folder.
        every: write every so many records of a kind. Each that is written has its distance read, which waits for the
            accelerator.

    Raises:
        ConfigError: a folder is given, and the package tensorboard is not installed; `every` is not allowed.
    """

    def __init__(self, writer: Any, every: int = 1) -> None:
        self._own = isinstance(writer, (str, Path))
        if self._own:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    f"writer: a folder needs the package tensorboard, got {str(writer)!r} ({error}); "
                    'run `pip install "decent-opt[monitoring]"`'
                ) from None
            writer = SummaryWriter(str(writer))
        self.writer, self.every = writer, checked_every(every)
        self._seen: dict[str, int] = {}

    def __call__(self, record: RoundRecord) -> None:
        """Write a record."""
        seen = self._seen[record.kind] = self._seen.get(record.kind, 0) + 1
        if seen % self.every:
            return
        sent = sum(record.bytes_sent.values())
        scalars = {
            "sent_MB": sent / 1e6,
            "received_MB": sum(record.bytes_received.values()) / 1e6,
            "of_an_all_reduce": sent / record.allreduce_bytes if record.allreduce_bytes else None,
            "encode_seconds": record.encode_seconds,
            "wait_seconds": sum(record.wait_seconds.values()),
            "decode_seconds": record.decode_seconds,
            "distance_to_average": record.consensus_distance,
        }
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(f"decent_opt/{record.kind}/{name}", value, record.step)

    def close(self) -> None:
        """Close the writer, if this sink has made it."""
        if self._own:
            self.writer.close()
