"""From a name to a compressor: "sign", "topk:share=0.01,block=1024", or one that somebody else has added.

@register
@dataclass(frozen=True)
class Ternary(Compressor):
    name = "ternary"
    options = (whole("chunk", 1, default=256),)
    chunk: int = 256
    ...

make_compressor("ternary:chunk=64")
"""

from __future__ import annotations

import difflib
from typing import Any, TypeAlias, TypeVar

from decent_opt.compression.base import Compressor
from decent_opt.errors import ConfigError
from decent_opt.options import read_options

CompressorSpec: TypeAlias = "str | Compressor"

_registry: dict[str, type[Compressor]] = {}
_Class = TypeVar("_Class", bound=type[Compressor])


def register(compressor: _Class) -> _Class:
    """Add a class under its `name`, as a decorator.

    Raises:
        ConfigError: another class has the name.
    """
    known = _registry.setdefault(compressor.name, compressor)
    if known is not compressor and (known.__module__, known.__qualname__) != (
        compressor.__module__,
        compressor.__qualname__,
    ):
        raise ConfigError(f"compressor: the name {compressor.name!r} is taken by {known.__qualname__}; choose another")
    _registry[compressor.name] = compressor
    return compressor


def names() -> tuple[str, ...]:
    """All names, in the order of their registration."""
    return tuple(_registry)


def make_compressor(spec: CompressorSpec) -> Compressor:
    """The compressor that `spec` describes: a name, with options after a colon, or an object, which is returned.

    Raises:
        ConfigError: an unknown name, or an option that is not allowed.
    """
    if isinstance(spec, Compressor):
        return spec
    name, _, text = (piece.strip() for piece in spec.partition(":")) if isinstance(spec, str) else ("", "", "")
    if name not in _registry:
        close = difflib.get_close_matches(name, _registry, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"compressor: allowed are {', '.join(_registry)}, or a Compressor, got {spec!r}{hint}")
    known = _registry[name]
    values: dict[str, Any] = read_options("compressor", name, text, known.options)
    return known(**values)
