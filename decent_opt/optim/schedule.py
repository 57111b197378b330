"""When something is exchanged: a pure function of the number of finished steps, the same on every rank.

Periods are kept in `param_groups` as a number or as text ("0:4,100:8"), because only numbers, strings and None
survive every framework's way of saving them.
"""

from __future__ import annotations

from functools import lru_cache

from decent_opt.config import Period
from decent_opt.errors import ConfigError


def period_to_entry(period: Period) -> int | str:
    """Return the period as it is kept in `param_groups`."""
    return period if isinstance(period, int) else ",".join(f"{start}:{p}" for start, p in period)


@lru_cache(maxsize=64)
def _segments(entry: str) -> tuple[tuple[int, int], ...]:
    try:
        segments = tuple((int(start), int(p)) for start, _, p in (part.partition(":") for part in entry.split(",")))
    except ValueError:
        segments = ()
    if not segments or segments[0][0] != 0 or min(p for _, p in segments) < 1:
        raise _refusal(entry)
    return segments


def _refusal(entry: object) -> ConfigError:
    return ConfigError(
        f'period: param_groups hold an integer >= 1 or text like "0:4,100:8" (from step 0 every 4th), got {entry!r}'
    )


def round_is_due(step: int, entry: int | str, warmup_steps: int) -> bool:
    """Is there a round after this step (counted from 1)?  step > warm-up and (step - start) mod p = 0.

    `start` and p belong to the last segment that begins before the step; an integer period starts at 0.

    Raises:
        ConfigError: the entry is neither; somebody has edited it.
    """
    if step <= warmup_steps:
        return False
    if type(entry) is int and entry > 0:
        return step % entry == 0
    if type(entry) is not str:
        raise _refusal(entry)
    start, p = next((s, p) for s, p in reversed(_segments(entry)) if s < step)
    return (step - start) % p == 0


def is_exact_average(round: int, global_every: int | None) -> bool:
    """Is this round (counted from 0) an exact average in place of a gossip round?"""
    return global_every is not None and (round + 1) % global_every == 0
