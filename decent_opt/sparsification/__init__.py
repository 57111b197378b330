"""The m/n block family: every worker sends an independently sampled share of the blocks of its gradient."""

from __future__ import annotations

from decent_opt.sparsification.estimators import Estimator, EstimatorName, Memory, Piece, make_estimator
from decent_opt.sparsification.exchange import Aggregation, BlockExchange
from decent_opt.sparsification.mean import BlockMean
from decent_opt.sparsification.sampler import BlockSampler, Masks

__all__ = [
    "Aggregation",
    "BlockExchange",
    "BlockMean",
    "BlockSampler",
    "Estimator",
    "EstimatorName",
    "Masks",
    "Memory",
    "Piece",
    "make_estimator",
]
