"""Rules from the papers: how large the consensus step may be, and when it is too large. Numbers only, no tensors."""

from __future__ import annotations

from decent_opt.theory.consensus import choco_gamma, choco_rate
from decent_opt.theory.step_size import GrowthGuard

__all__ = ["GrowthGuard", "choco_gamma", "choco_rate"]
