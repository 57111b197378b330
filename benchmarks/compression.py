"""Speed of the compressors on 25M floats, one thread, as a ratio to `Tensor.copy_` in the same run.

    python benchmarks/compression.py

Floors are what we ask of them. `of the limit` compares with the memory that has to be touched at least: a copy moves
8 bytes per element; encoding 4 and the message; decode-accumulate 8 and the message.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from decent_opt.compression import make_compressor
from decent_opt.compression.measure import measure

ELEMENTS = 25_000_000
# compressor -> least ratio of encode, of decode-accumulate; None: reported only
FLOORS: dict[str, tuple[float | None, float | None]] = {
    "identity": (None, None),
    "bf16": (0.9, 0.5),
    "fp16": (None, None),
    "sign": (0.5, 0.5),
    "random-blocks:share=0.125": (5.0, None),
    "random-blocks:share=0.125,block=1024": (None, None),
    "randk:share=0.125": (None, None),
    "int8": (0.3, None),
    "int4": (None, None),
    "int2": (None, None),
    "topk:share=0.01": (0.08, None),
    "topk-global:share=0.01": (None, None),
}


def main() -> None:
    """Measure and print."""
    table = Table(title=f"{ELEMENTS:,} floats, one thread; ratio to a copy", title_justify="left")
    for column in ("compressor", "bits", "encode", "floor", "of the limit", "decode and add", "floor", "of the limit"):
        table.add_column(column)
    for spec, (encode_floor, decode_floor) in FLOORS.items():
        speed = measure(make_compressor(spec), ELEMENTS)
        message = speed.nbytes / ELEMENTS
        read = message / 4 if spec.startswith("rand") else 1.0
        written = message / 4 if spec.startswith(("rand", "topk")) else 1.0
        table.add_row(
            spec,
            f"{8 * message:.3g}",
            f"{speed.encode_ratio:.2f}",
            "" if encode_floor is None else f"{encode_floor:g}",
            f"{speed.encode_ratio * (4 * read + message) / 8:.0%}",
            f"{speed.decode_ratio:.2f}",
            "" if decode_floor is None else f"{decode_floor:g}",
            f"{speed.decode_ratio * (8 * written + message) / 8:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
