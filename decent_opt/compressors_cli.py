"""`decent-opt compressors`: what there is, what it promises, and how fast it is on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.markup import escape
from rich.table import Table

from decent_opt.compression import Layout, make_compressor, names
from decent_opt.compression.measure import measure

SHAPE = (1024, 1024)


def table(specs: Sequence[str] | None, elements: int) -> Table:
    """A row for each of these compressors, or for all; each is timed on `elements` float32 numbers.

    Raises:
        ConfigError: an unknown name or option.
    """
    chosen = [make_compressor(spec) for spec in specs or names()]
    found = Table(title="compressors", title_justify="left")
    for column in ("name and options", "delta or omega", "bits", "gamma", "encode", "decode and add"):
        found.add_column(column, overflow="fold")
    layout = Layout.of(SHAPE)
    for one in chosen:
        speed, delta, omega = measure(one, elements), one.delta(layout), one.omega(layout)
        law = f"delta {delta:.3g}" if delta is not None else f"omega {omega:.3g}"
        if delta is not None and one.typical_delta(layout) != delta:
            law += f" (Gaussian {one.typical_delta(layout):.3g})"
        found.add_row(
            escape(one.spec),
            law,
            f"{one.bits(layout, torch.float32):.4g}",
            f"{one.gamma:.3g}",
            f"{speed.encode_ratio:.2f}",
            f"{speed.decode_ratio:.2f}",
        )
    return found
