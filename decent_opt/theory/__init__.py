"""What the papers prove, as functions of a topology and a compressor; and rules for the consensus step size.

`choco_gamma` and `choco_rate` are the theory's step size and rate, `bounds` the right-hand sides of the convergence
theorems; `blocks` has the step sizes of the m/n block methods. `GrowthGuard` and `AutoGamma` watch the public copies
while training, where the theory is too careful.
"""

from __future__ import annotations

from decent_opt.theory.blocks import (
    NesterovConstants,
    ibcd_rate,
    ibcd_slowdown,
    ibcd_step,
    isaga_rate,
    isaga_safe_step,
    isaga_step,
    isega_practical_step,
    isega_rate,
    isega_step,
    isgd_decreasing_steps,
    isgd_noise_floor,
    isgd_step,
    nesterov_constants,
    sparsified_dissimilarity,
    sparsified_growth,
)
from decent_opt.theory.bounds import (
    Constants,
    compressed_consensus_bound,
    consensus_bound,
    gradient_bound,
    largest_lr,
)
from decent_opt.theory.consensus import choco_gamma, choco_rate
from decent_opt.theory.step_size import AutoGamma, GrowthGuard

__all__ = [
    "AutoGamma",
    "Constants",
    "GrowthGuard",
    "NesterovConstants",
    "choco_gamma",
    "choco_rate",
    "compressed_consensus_bound",
    "consensus_bound",
    "gradient_bound",
    "ibcd_rate",
    "ibcd_slowdown",
    "ibcd_step",
    "isaga_rate",
    "isaga_safe_step",
    "isaga_step",
    "isega_practical_step",
    "isega_rate",
    "isega_step",
    "isgd_decreasing_steps",
    "isgd_noise_floor",
    "isgd_step",
    "largest_lr",
    "nesterov_constants",
    "sparsified_dissimilarity",
    "sparsified_growth",
]
