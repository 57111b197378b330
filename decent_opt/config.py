"""DecentConfig: the one validated description of a decentralised run that every entry point reads.

Decentralized(optimizer, config="run.yaml", period=4)

A value is taken from the first of: keyword argument, `config=` (a file, a dict, a `DecentConfig`), the class's own
default (`LocalAdamW` has some), the default below. Where no `config=` is given, the environment variable
DECENT_OPT_CONFIG stands in for it. How sources are read: `config_sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from decent_opt.config_sources import Source, read, shown, unknown
from decent_opt.errors import ConfigError

Period = int | list[tuple[int, int]]

# Counts are kept in checkpoints as numbers; far above any training, they must still fit into 64 bits.
_MOST = 10**15
_COUNT = "from {} to 10**15"

# What the sentence about a refused value says is allowed.
ALLOWED = {
    "period": f"an integer {_COUNT.format(1)}, or a list of pairs of them, (from_step, period), whose from_step "
    "begins at 0 and rises",
    "topology": "a name, a matrix (n, n) of weights, a networkx.Graph, a list of these (one a round), or a Topology",
    "warmup_steps": f"an integer {_COUNT.format(0)}",
    "global_every": f"None or an integer {_COUNT.format(1)}",
    "outer_momentum": "a number >= 0 and < 1",
    "momentum_sync": '"local" or "average"',
    "algorithm": '"pd" or "cpd"',
    "compressor": 'a name ("sign", "topk:share=0.01", ...) or a Compressor, and algorithm="cpd"',
    "order": '"paper" or "fresh"',
    "gamma": 'None, a number > 0 and <= 1, "theory" or "auto"',
    "dense": "a list of patterns of parameter names",
    "seed": "an integer from -2**63 to 2**63 - 1",
    "buffers": '"average", "broadcast" or "local"',
    "overlap_steps": "an integer from 0 to the shortest period",
    "message_dtype": 'None, "bfloat16" or "float16"',
    "bucket_mb": "a number > 0 and <= 10**6",
    "timeout": "a number of seconds > 0 and < 10**9",
    "on_nonfinite": '"skip" or "raise"',
    "on_peer_loss": '"raise" or "continue"',
    "sync_init": "True or False",
}

_PERIOD_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": _MOST},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array",
                "prefixItems": [{"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}],
                "minItems": 2,
                "maxItems": 2,
            },
        },
    ]
}
_MATRIX_SCHEMA = {"type": "array", "items": {"type": "array", "items": {"type": "number", "minimum": 0}}}
_COMPRESSOR_SCHEMA = {"type": "string", "minLength": 1}
_ONE_ROUND = [{"type": "string", "minLength": 1}, _MATRIX_SCHEMA]
_TOPOLOGY_SCHEMA = {"anyOf": [*_ONE_ROUND, {"type": "array", "minItems": 1, "items": {"anyOf": _ONE_ROUND}}]}


class DecentConfig(BaseModel):
    """Options of `Decentralized` and of everything built on it.

    Raises:
        ConfigError: one sentence that names the field, what is allowed and the value.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True, use_attribute_docstrings=True
    )

    period: Period = Field(default=8, json_schema_extra=lambda schema: _replace(schema, _PERIOD_SCHEMA))
    """Local steps per round, p >= 1; or a list of (from_step, p): p holds for steps after from_step."""

    topology: Any = Field(default="ring", json_schema_extra=lambda schema: _replace(schema, _TOPOLOGY_SCHEMA))
    """Who mixes with whom: a name ("ring", "complete", ...), a doubly stochastic matrix of shape (n, n), a list
    of these, one a round, a graph or a `Topology`. Checked when the number of workers is known."""

    warmup_steps: int = Field(default=0, ge=0, le=_MOST)
    """The first steps average gradients exactly, as plain DDP does; rounds begin afterwards."""

    global_every: int | None = Field(default=None, ge=1, le=_MOST)
    """Every H-th round is an exact average over all workers (Gossip-PGA, arXiv 2105.09080)."""

    outer_momentum: float = Field(default=0.0, ge=0.0, lt=1.0, allow_inf_nan=False)
    """beta of slow momentum over gossip, 0 <= beta < 1; costs no traffic, two tensors of state."""

    momentum_sync: Literal["local", "average"] = "local"
    """"local" keeps the momentum on its worker (the paper); "average" mixes it with the same W."""

    algorithm: Literal["pd", "cpd"] = "pd"
    """"pd" sends parameters (PD-SGDM); "cpd" sends compressed differences to public copies (CPD-SGDM)."""

    compressor: Any = Field(default="sign", json_schema_extra=lambda schema: _replace(schema, _COMPRESSOR_SCHEMA))
    """cpd: what is done to the differences, a name with options or a `Compressor`; `decent-opt compressors` lists
    them."""

    order: Literal["paper", "fresh"] = "paper"
    """cpd: "paper" mixes with the copies of the last round, and its messages travel during the next local steps;
    "fresh" sends first, waits, and mixes with the new ones."""

    gamma: float | Literal["theory", "auto"] | None = None
    """cpd: the consensus step size, 0 < gamma <= 1; None: what suits the compressor; "theory": provably stable, and 30
    to 500 times smaller; "auto": begins at a quarter of what suits the compressor, and is raised as long as the copies
    follow."""

    dense: list[str] = []
    """cpd: parameters whose names match one of these patterns ("*.bias", "*norm*") are sent uncompressed."""

    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """cpd: of random compressors."""

    buffers: Literal["average", "broadcast", "local"] = "average"
    """The model's floating-point buffers (normalisation statistics): "average" mixes them in rounds like parameters and
    averages them in `consensus_`; "broadcast" takes rank 0's in `consensus_`; "local" leaves them alone."""

    overlap_steps: int = Field(default=0, ge=0, le=_MOST)
    """Local steps that the exchange of a round may take, 0 to the shortest period; its correction is added to the
    parameters after them. 0 waits."""

    message_dtype: Literal["bfloat16", "float16"] | None = None
    """Send parameters in half precision, where theirs is wider: half of the bytes, the average is kept."""

    bucket_mb: float = Field(default=25.0, gt=0.0, le=1e6, allow_inf_nan=False)
    """Upper limit of a message in MB (10^6 bytes)."""

    timeout: float = Field(default=300.0, gt=0.0, lt=1e9, allow_inf_nan=False)
    """Seconds before a wait for a peer raises."""

    on_nonfinite: Literal["skip", "raise"] = "skip"
    """What to do at a round about infinite or NaN parameters, which never leave their worker: "skip" restores them from
    the neighbours and warns; "raise" stops there."""

    on_peer_loss: Literal["raise", "continue"] = "raise"
    """What to do when a peer is lost: "raise" `PeerLost`, or "continue": those who are left, if they are a majority,
    make a new graph of the same name, take one exact average and go on (gloo)."""

    sync_init: bool = True
    """Broadcast rank 0's parameters and buffers at construction."""

    def __init__(self, /, **options: Any) -> None:
        for name in options:
            if name not in type(self).model_fields:
                raise ConfigError(unknown(name, options[name], type(self).model_fields))
        try:
            super().__init__(**options)
        except ValidationError as error:
            name = str(error.errors(include_url=False)[0]["loc"][0])
            raise ConfigError(f"{name}: allowed is {ALLOWED[name]}, got {shown(options[name])}") from None
        shortest = self.period if isinstance(self.period, int) else min(p for _, p in self.period)
        if self.overlap_steps > shortest:
            allowed = f"{ALLOWED['overlap_steps']}, which is {shortest}"
            raise ConfigError(f"overlap_steps: allowed is {allowed}, got {self.overlap_steps}")
        if self.overlap_steps and self.momentum_sync == "average":
            raise ConfigError("momentum_sync: allowed is \"local\" with overlap_steps, got 'average'")
        self._check_algorithm()

    def _check_algorithm(self) -> None:
        """Nothing that the algorithm does not have may be asked of it."""
        elsewhere: dict[str, dict[str, tuple[object, str]]] = {
            "pd": dict.fromkeys(("compressor", "order", "gamma", "dense", "seed"), (None, "nothing")),
            "cpd": {"overlap_steps": (0, "0"), "message_dtype": (None, "None"), "momentum_sync": ("local", '"local"')},
        }
        for name, (value, allowed) in elsewhere[self.algorithm].items():
            if name in self.model_fields_set and getattr(self, name) != value:
                raise ConfigError(
                    f'{name}: allowed is {allowed} with algorithm="{self.algorithm}", got {shown(getattr(self, name))}'
                )

    @classmethod
    def load(cls, source: Source = None, /, **overrides: Any) -> DecentConfig:
        """Build a config from a source and keyword arguments, which win.

        Args:
            source: a JSON or YAML file, JSON text that begins with "{", a mapping, or a `DecentConfig`, of which
                those fields count that were set. None: what DECENT_OPT_CONFIG names, if anything.
            overrides: fields.

        Raises:
            ConfigError: the source cannot be read, or has a field or value that is not allowed.
        """
        return cls._merged(source, overrides, {})

    @classmethod
    def _merged(cls, source: Source, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> DecentConfig:
        if isinstance(source, DecentConfig):
            values = source._set()
        else:
            values, origin = read(source, cls.model_fields)
            try:
                cls(**values)
            except ConfigError as error:
                raise ConfigError(f"{error} (in {origin})" if origin else str(error)) from None
        return cls(**{**defaults, **values, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """The fields that were set, ready for JSON: matrices as nested lists. `DecentConfig(**d)` is this config.

        A `Topology` object becomes its matrices; an object that has none stays as it is.
        """
        values = self._set()
        if isinstance(values.get("period"), list):
            values["period"] = [list(segment) for segment in values["period"]]
        spec: Any = values.get("topology")
        if hasattr(spec, "matrix") and hasattr(spec, "period"):
            values["topology"] = [np.asarray(spec.matrix(round)).tolist() for round in range(spec.period)]
        if hasattr(values.get("compressor"), "spec"):
            values["compressor"] = values["compressor"].spec
        return values

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema of a configuration file."""
        schema = cls.model_json_schema()
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **schema,
            "description": schema["description"].partition("\n")[0],
        }

    def _set(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @field_validator("*", mode="before")
    @classmethod
    def _numpy_scalars_are_numbers(cls, value: object) -> object:
        return value.item() if isinstance(value, np.generic) else value

    @field_validator("period", mode="before")
    @classmethod
    def _check_period(cls, value: object) -> object:
        segments = value if isinstance(value, (list, tuple)) and value else [(0, value)]
        checked = []
        for segment in segments:
            if not isinstance(segment, (list, tuple)) or len(segment) != 2:
                raise ValueError
            start, period = (v.item() if isinstance(v, np.generic) else v for v in segment)
            if not (type(start) is type(period) is int and 0 <= start <= _MOST and 1 <= period <= _MOST):
                raise ValueError
            checked.append((start, period))
        starts = [start for start, _ in checked]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError
        return checked if segments is value else checked[0][1]

    @field_validator("gamma", mode="before")
    @classmethod
    def _check_gamma(cls, value: object) -> object:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value <= 1:
            raise ValueError
        return float(value) if type(value) is int else value

    @field_validator("compressor", mode="before")
    @classmethod
    def _check_compressor(cls, value: object) -> object:
        # Names are for the compressors to know, and objects pass.
        if (isinstance(value, str) and value.strip()) or hasattr(value, "decode_add_"):
            return value
        raise ValueError

    @field_validator("topology", mode="before")
    @classmethod
    def _check_topology(cls, value: object) -> object:
        return _plain_topology(value)


def resolve(
    config: Source, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> DecentConfig | ConfigError:
    """`DecentConfig.load` for code that must tell the other ranks before it raises: an error is returned.

    Args:
        config: a source; see `DecentConfig.load`.
        options: keyword arguments, which win.
        defaults: the caller's own defaults, which the source wins over.
    """
    try:
        return DecentConfig._merged(config, options, defaults or {})
    except ConfigError as error:
        return error


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None: those that a caller gave."""
    return {name: value for name, value in options.items() if value is not None}


def _plain_topology(value: Any, in_schedule: bool = False) -> object:
    """Matrices as nested lists, so that configurations can be compared and saved; ValueError if it can be nothing."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and value:
        value = [item.tolist() if isinstance(item, np.ndarray) else item for item in value]
        if all(isinstance(leaf, (int, float, np.number)) and not isinstance(leaf, bool) for leaf in _leaves(value)):
            return _weights(value, (2,) if in_schedule else (2, 3))
        if not in_schedule:
            return [_plain_topology(item, in_schedule=True) for item in value]
    # Names and objects pass: what they mean is for the topologies to say.
    if value is None or value == "" or isinstance(value, (bool, int, float, complex, bytes, list, tuple, set, Mapping)):
        raise ValueError
    return value


def _weights(value: list[Any], allowed_dimensions: tuple[int, ...]) -> object:
    try:
        array = np.array(value, dtype=np.float64)
    except OverflowError:  # an integer beyond float64; pydantic takes ValueError only
        raise ValueError from None
    if array.ndim not in allowed_dimensions or not array.size:
        raise ValueError
    return array.tolist()


def _leaves(value: object, depth: int = 3) -> list[object]:
    """What is not a list, down to a depth where nothing but numbers belongs (YAML can make lists without end)."""
    if depth and isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item, depth - 1)]
    return [value]


def _replace(schema: dict[str, Any], by: dict[str, Any]) -> None:
    kept: dict[str, Any] = {name: schema[name] for name in ("default", "description", "title") if name in schema}
    schema.clear()
    schema.update({**kept, **by})
