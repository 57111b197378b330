"""Compressors: vectors to bytes and back. They know of no process, no round and no optimizer.

`make_compressor` turns a name with options into a `Compressor`; `register` adds one.
"""

from __future__ import annotations

from decent_opt.compression.base import Compressor, Key, Layout, row_of
from decent_opt.compression.dense import Identity
from decent_opt.compression.registry import CompressorSpec, make_compressor, names, register
from decent_opt.compression.sign import Sign

__all__ = [
    "Compressor",
    "CompressorSpec",
    "Identity",
    "Key",
    "Layout",
    "Sign",
    "make_compressor",
    "names",
    "register",
    "row_of",
]
