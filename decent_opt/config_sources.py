"""Where a configuration comes from: a mapping, a JSON or YAML file, JSON text, the environment; and its sentences."""

from __future__ import annotations

import difflib
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from decent_opt.errors import ConfigError

if TYPE_CHECKING:
    from decent_opt.config import DecentConfig

VARIABLE = "DECENT_OPT_CONFIG"

Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | DecentConfig | None"


def read(source: object, fields: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the values that a source holds, and its name as errors tell it ("" where the caller has it at hand).

    None reads what the environment variable names; where it is not set, there are no values.

    Raises:
        ConfigError: it cannot be read, or a key is no text.
    """
    field = "config"
    if source is None:
        field, source = VARIABLE, os.environ.get(VARIABLE) or {}
    if isinstance(source, Mapping):
        values, origin = source, ""
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        values, origin = _parse_json(field, "JSON text", source), VARIABLE if field == VARIABLE else ""
    elif isinstance(source, (str, os.PathLike)) and isinstance(os.fspath(source), str) and os.fspath(source):
        values, origin = _read_file(field, Path(source)), str(source)
    else:
        raise ConfigError(
            f"{field}: allowed is the path of a JSON or YAML file, JSON text that begins with {{, a dict or a "
            f"DecentConfig, got {shown(source)}"
        )
    for key in values:
        if not isinstance(key, str):
            where = f" (in {origin})" if origin else ""
            raise ConfigError(unknown(key, values[key], fields) + where)
    return dict(values), origin


def _read_file(field: str, path: Path) -> Mapping[Any, Any]:
    kind = path.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{field}: allowed are files that end in .json, .yaml or .yml, got {shown(str(path))}")
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{field}: allowed is a file that can be read, got {shown(str(path))}, {error.strerror}"
        ) from None
    except ValueError:  # bytes that are no text; a path with a null in it
        raise ConfigError(f"{field}: allowed is a UTF-8 text file, got {shown(str(path))}") from None
    return _parse_json(field, str(path), text) if kind == ".json" else _parse_yaml(field, str(path), text)


def _parse_json(field: str, name: str, text: str) -> Mapping[Any, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg[:1].lower()}{error.msg[1:]} in line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):  # an integer of thousands of digits; brackets without end
        reason = "a number too long or brackets too deep"
    else:
        return _as_mapping(field, name, value)
    raise ConfigError(f"{field}: allowed is valid JSON, got {name}: {reason}")


def _parse_yaml(field: str, name: str, text: str) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{field}: allowed is JSON as long as PyYAML is missing, got {name}; "
            "run `pip install pyyaml` or write it as .json"
        ) from None
    try:
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = f"{' '.join(str(error.problem or error.context).split())}{place}"
    except yaml.YAMLError:
        reason = "a character that YAML does not allow"
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # impossible dates, too long numbers, endless nesting
        reason = "a number or date that cannot be, or brackets too deep"
    else:
        return _as_mapping(field, name, value)
    raise ConfigError(f"{field}: allowed is valid YAML, got {name}: {reason}")


def _as_mapping(field: str, name: str, value: object) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    raise ConfigError(f"{field}: allowed is a mapping of options at the top level, got {shown(value)} in {name}")


def unknown(name: object, value: object, fields: Iterable[str]) -> str:
    """The sentence about an option that does not exist."""
    fields = list(fields)
    close = difflib.get_close_matches(name, fields, 1) if isinstance(name, str) else []
    hint = f" (perhaps {close[0]} is meant)" if close else ""
    label = name if isinstance(name, str) and name.isidentifier() and len(name) <= 60 else shown(name)
    return f"{label}: no such option; allowed are {', '.join(fields)}, got {label} = {shown(value)}{hint}"


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = _repr.maxlist = _repr.maxtuple = _repr.maxdict = 4


def shown(value: object) -> str:
    """`repr` on one line, shortened where it is long."""
    try:
        text = " ".join(_repr.repr(value).split())
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"a {type(value).__name__} with a number too long to show"
    except Exception:  # whatever a stranger's __repr__ does
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."
