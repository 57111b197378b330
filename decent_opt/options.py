"""Options of something with a name, as text: "torus:4x8", "random-regular:degree=4,seed=1", "topk:share=0.01".

    name[:option[,option ...]]        option = key=value, or the value alone for the first option of a torus

What cannot be read raises a ConfigError that names the field, the value and what is allowed. An option may hold
a topology of its own (hierarchical:group=8,outer=base:k=1), which may then have one option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decent_opt.errors import ConfigError

REQUIRED = object()


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        key: its name.
        read: from its text to its value; ValueError if it cannot.
        allowed: a phrase that says what `read` takes.
        default: its value where it is not given, or REQUIRED.
        bare: whether the value may stand without its key.
    """

    key: str
    read: Callable[[str], Any]
    allowed: str
    default: Any = REQUIRED
    bare: bool = False


def whole(key: str, least: int, default: Any = REQUIRED) -> Option:
    """A whole number from `least` on."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise ValueError
        return int(text)

    return Option(key, read, f"a whole number from {least} on", default)


def share(key: str, default: Any = REQUIRED) -> Option:
    """A share of a whole: above 0, up to 1."""

    def read(text: str) -> float:
        value = float(text)
        if not 0.0 < value <= 1.0:
            raise ValueError
        return value

    return Option(key, read, "a number > 0 and <= 1", default)


def choice(key: str, values: Sequence[str]) -> Option:
    """One of these words; the first is the default."""

    def read(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return Option(key, read, " or ".join(values), values[0])


def shape(key: str) -> Option:
    """Rows and columns, as in 4x8."""

    def read(text: str) -> tuple[int, int]:
        match = re.fullmatch("([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
        if not match:
            raise ValueError
        return int(match[1]), int(match[2])

    return Option(key, read, "rows x columns, as in 4x8", None, bare=True)


def read_options(field: str, name: str, text: str, options: Sequence[Option]) -> dict[str, Any]:
    """The value of each option of `name`, given the text after its colon; `field` is who is named in errors."""
    values: dict[str, Any] = {}
    by_key = {option.key: option for option in options}
    bare = next((option.key for option in options if option.bare), None)
    for part in text.split(",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and bare is not None:
            key, value = bare, key
        elif not equals:
            raise ConfigError(f"{field}: cannot read {part.strip()!r} of {name}; {_allowed(name, options)}")
        if key not in by_key:
            raise ConfigError(f"{field}: {name} has no option {key!r}; {_allowed(name, options)}")
        if key in values:
            raise ConfigError(f"{field}: {name} has {key!r} twice; give it once")
        try:
            values[key] = by_key[key].read(value)
        except ValueError:
            raise ConfigError(f"{field}: {key} of {name} must be {by_key[key].allowed}, got {value!r}") from None
    for option in options:
        if values.setdefault(option.key, option.default) is REQUIRED:
            raise ConfigError(
                f"{field}: {name} needs {option.key}=..., {option.allowed}; write {name}:{option.key}=4 for example"
            )
    return values


def _allowed(name: str, options: Sequence[Option]) -> str:
    if not options:
        return f"{name} takes no options"
    return f"allowed are {', '.join(f'{option.key}= ({option.allowed})' for option in options)}"
