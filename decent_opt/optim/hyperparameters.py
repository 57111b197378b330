"""Our entries in `param_groups`: hyperparameters and counters, as numbers, strings and None.

Every group carries a copy, because tools save and load groups one by one. The first group's values are in force, so an
edited value takes effect; edit it on every rank at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decent_opt.config import DecentConfig
from decent_opt.errors import ConfigError
from decent_opt.optim.schedule import period_to_entry

STEP = "decent_step"  # optimizer steps finished
ROUND = "decent_round"  # rounds begun
DUE = "decent_due"  # the step after which the round in flight is applied; None if there is none
GAMMA = "decent_gamma"  # CPD-SGDM: the consensus step size; None with PD-SGDM
AUTO = "decent_auto"  # what gamma="auto" has seen so far, as text; None without it
MATRIX = "decent_matrix"  # tells for which W the public copies in the state are; None with PD-SGDM
_FROM_CONFIG = ("warmup_steps", "global_every", "outer_momentum", "momentum_sync")

OURS = ("period", *_FROM_CONFIG, STEP, ROUND, DUE, GAMMA, MATRIX, AUTO)


def enter(groups: Sequence[dict[str, Any]], config: DecentConfig, gamma: float | None = None) -> dict[str, Any]:
    """Write into every group what is in force: the first group's values, or else the config's; return them."""
    defaults: dict[str, Any] = {"period": period_to_entry(config.period), STEP: 0, ROUND: 0, DUE: None}
    defaults |= {MATRIX: None, AUTO: None}
    defaults.update({name: getattr(config, name) for name in _FROM_CONFIG})
    in_force = {name: groups[0].setdefault(name, value) for name, value in defaults.items()}
    # A state of the other algorithm may have been loaded.
    in_force[GAMMA] = None if gamma is None else groups[0].get(GAMMA) or gamma
    for group in groups:
        group.update(in_force)
    return in_force


def check_alike(first: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise `ConfigError` if a group of the user's has another value than the first: there is one for all."""
    for name in ("period", *_FROM_CONFIG):
        if name in group and name in first and group[name] != first[name]:
            raise ConfigError(
                f"{name}: a parameter group has {group[name]!r}, the first group has {first[name]!r}; "
                "it is one value for all groups"
            )
