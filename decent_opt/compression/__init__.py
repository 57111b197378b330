"""Compressors: vectors to bytes and back. They know of no process, no round and no optimizer.

`make_compressor` turns a name with options into a `Compressor`; `register` adds one.
"""

from __future__ import annotations

from decent_opt.compression.base import Compressor, Key, Layout, row_of
from decent_opt.compression.dense import BFloat16, Float16, Identity
from decent_opt.compression.quantize import Int2, Int4, Int8
from decent_opt.compression.randk import RandK
from decent_opt.compression.random import RandomBlocks
from decent_opt.compression.registry import CompressorSpec, make_compressor, names, register
from decent_opt.compression.sign import Sign
from decent_opt.compression.topk import TopK
from decent_opt.compression.topk_global import TopKGlobal

__all__ = [
    "BFloat16",
    "Compressor",
    "CompressorSpec",
    "Float16",
    "Identity",
    "Int2",
    "Int4",
    "Int8",
    "Key",
    "Layout",
    "RandK",
    "RandomBlocks",
    "Sign",
    "TopK",
    "TopKGlobal",
    "make_compressor",
    "names",
    "register",
    "row_of",
]
