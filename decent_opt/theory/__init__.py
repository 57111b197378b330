"""What the papers prove, as functions of a topology and a compressor; and rules for the consensus step size.

`choco_gamma` and `choco_rate` are the theory's step size and rate, `bounds` the right-hand sides of the convergence
theorems. `GrowthGuard` and `AutoGamma` watch the public copies while training, where the theory is too careful.
"""

from __future__ import annotations

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
    "choco_gamma",
    "choco_rate",
    "compressed_consensus_bound",
    "consensus_bound",
    "gradient_bound",
    "largest_lr",
]
