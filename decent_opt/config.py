"""DecentConfig: the one validated description of a decentralised run that every entry point reads."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from decent_opt.errors import ConfigError

Period = int | list[tuple[int, int]]


class DecentConfig(BaseModel):
    """Options of `Decentralized` and of everything built on it.

    Attributes:
        period: local steps per round, p >= 1; or a list of (from_step, p): p holds for steps after from_step.
        topology: a name ("ring", "complete", "star", "hypercube", "exponential", "one-peer-exponential"), a
            doubly stochastic matrix of shape (n, n), or a `Topology`.
        warmup_steps: the first steps average gradients exactly, as plain DDP does; rounds begin afterwards.
        global_every: every H-th round is an exact average over all workers (Gossip-PGA, arXiv 2105.09080).
        outer_momentum: beta of slow momentum over gossip, 0 <= beta < 1; costs no traffic, two tensors of state.
        momentum_sync: "local" keeps the momentum on its worker (the paper); "average" mixes it with the same W.
        overlap_steps: local steps that the exchange of a round may take, 0 to the period; its correction is added to
            the parameters after them. 0 waits.
        message_dtype: "bfloat16" or "float16" to send float32 parameters in half of the bytes.
        bucket_mb: upper limit of a message in MB (10^6 bytes).
        timeout: seconds before a wait for a peer raises.
        sync_init: broadcast rank 0's parameters and buffers at construction.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True)

    period: Period = 8
    topology: Any = "ring"
    warmup_steps: int = Field(default=0, ge=0)
    global_every: int | None = Field(default=None, ge=1)
    outer_momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    momentum_sync: Literal["local", "average"] = "local"
    overlap_steps: int = Field(default=0, ge=0)
    message_dtype: Literal["bfloat16", "float16"] | None = None
    bucket_mb: float = Field(default=25.0, gt=0.0, allow_inf_nan=False)
    timeout: float = Field(default=300.0, gt=0.0, allow_inf_nan=False)
    sync_init: bool = True

    @field_validator("period", mode="before")
    @classmethod
    def _check_period(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("a period is at least 1 step")
            return value
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError("allowed are an integer >= 1 or a list of (from_step, period)")
        segments = []
        for segment in value:
            if not (isinstance(segment, (list, tuple)) and [type(v) for v in segment] == [int, int]):
                raise ValueError("each segment is a pair of integers (from_step, period)")
            segments.append((segment[0], segment[1]))
        starts = [start for start, _ in segments]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError("segments begin at step 0 and their steps rise")
        if min(p for _, p in segments) < 1:
            raise ValueError("a period is at least 1 step")
        return segments

    @model_validator(mode="after")
    def _check_overlap(self) -> DecentConfig:
        shortest = self.period if isinstance(self.period, int) else min(p for _, p in self.period)
        if self.overlap_steps > shortest:
            raise ValueError(f"overlap_steps: at most the period, {shortest}, got {self.overlap_steps}")
        if self.overlap_steps and self.momentum_sync == "average":
            raise ValueError("momentum_sync: only \"local\" goes with overlap_steps, got 'average'")
        return self

    @classmethod
    def checked(cls, **options: Any) -> DecentConfig:
        """Build a config.

        Raises:
            ConfigError: one sentence that names the field, what is allowed and the value.
        """
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{name}: no such option; allowed are {', '.join(DecentConfig.model_fields)}"
    reason = first["msg"].removeprefix("Value error, ")
    if not name:
        return reason
    return f"{name}: {reason[:1].lower()}{reason[1:]}, got {first['input']!r}"
