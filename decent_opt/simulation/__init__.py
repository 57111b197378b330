"""All workers in one array: the algorithms written from their formulas, and problems with known answers.

`PeriodicTwin` is the second opinion on what the distributed code computes; the two share no line but W.
"""

from __future__ import annotations

from decent_opt.simulation.compressed import CompressedTwin, ExplicitCopiesTwin
from decent_opt.simulation.matrix import PeriodicTwin
from decent_opt.simulation.quadratic import NoisyQuadratics, noisy_quadratics
from decent_opt.simulation.rules import SGDM, AdamW
from decent_opt.simulation.second_moment import SharedMomentAdamW

__all__ = [
    "SGDM",
    "AdamW",
    "CompressedTwin",
    "ExplicitCopiesTwin",
    "NoisyQuadratics",
    "PeriodicTwin",
    "SharedMomentAdamW",
    "noisy_quadratics",
]
