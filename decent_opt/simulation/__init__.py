"""All workers in one array: the algorithms written from their formulas, and problems with known answers.

`PeriodicTwin` is the second opinion on what the distributed code computes; the two share no line but W. `BlockTwin` and
its kinds are that for the m/n block methods, on the finite sums of `finite_sums`.
"""

from __future__ import annotations

from decent_opt.simulation.blocks import (
    IASGD,
    IBCD,
    ISGD,
    BlockTwin,
    ErrorFeedback,
    coordinate_mask,
    everything,
    mask_of,
    one_sample,
    steps_until,
)
from decent_opt.simulation.compressed import CompressedTwin, ExplicitCopiesTwin
from decent_opt.simulation.control_variates import DIANA, ISAGA, ISEGA, SharedISAGA, l1_prox
from decent_opt.simulation.finite_sums import (
    FiniteSum,
    LeastSquares,
    Logistic,
    breast_cancer,
    least_squares,
    logistic,
    split,
)
from decent_opt.simulation.matrix import PeriodicTwin
from decent_opt.simulation.quadratic import NoisyQuadratics, noisy_quadratics
from decent_opt.simulation.rules import SGDM, AdamW
from decent_opt.simulation.second_moment import SharedMomentAdamW

__all__ = [
    "DIANA",
    "IASGD",
    "IBCD",
    "ISAGA",
    "ISEGA",
    "ISGD",
    "SGDM",
    "AdamW",
    "BlockTwin",
    "CompressedTwin",
    "ErrorFeedback",
    "ExplicitCopiesTwin",
    "FiniteSum",
    "LeastSquares",
    "Logistic",
    "NoisyQuadratics",
    "PeriodicTwin",
    "SharedISAGA",
    "SharedMomentAdamW",
    "breast_cancer",
    "coordinate_mask",
    "everything",
    "l1_prox",
    "least_squares",
    "logistic",
    "mask_of",
    "noisy_quadratics",
    "one_sample",
    "split",
    "steps_until",
]
