"""What a worker sends in part, and the gradient that all make of it: three ways to live with m/n blocks.

Worker i has its gradient g_i and draws blocks U_i. It sends q_i = (v_i)_{U_i}; everybody gets S = sum_i q_i.

    unbiased           v_i = g_i           gradient = (m / k n) S
    error feedback     v_i = g_i + e_i     gradient = (1 / n) S                e_i <- v_i - q_i
    control variate    v_i = g_i - h_i     gradient = hbar + (m / k n) S       h_i <- h_i + q_i;  hbar <- hbar + S / n

The first is ISGD (IBCD with exact gradients), the third ISEGA, of "99% of Distributed Optimization is a Waste of Time"
(arXiv 1901.09437); the second is EF-SGD (Karimireddy et al. 2019) with k of m blocks, which keep the share k / m of a
vector. Unbiased gradients cost noise, up to m / k times as much of it as an average of whole gradients has where that
is independent; so use it where gradients vanish at the optimum, or take error feedback, which loses nothing. A control
variate needs neither: h_i learns the gradient that worker i has at the optimum; but with noisy gradients it learns the
noise as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from decent_opt.errors import ConfigError

EstimatorName = Literal["unbiased", "error_feedback", "control_variate"]
Memory: TypeAlias = "dict[str, Tensor]"
"""What one worker keeps of one tensor: name -> flat, float32 at least, zero at first."""


@dataclass
class Piece:
    """One tensor, or one whole vector, on its way; all flat and of one length.

    Attributes:
        v: g_i before `prepare`, v_i after it.
        memory: see `Estimator.memories`.
        q: what was sent of v, zero elsewhere; only where there are memories.
        total: S before `finish`, the gradient after it.
    """

    v: Tensor
    memory: Memory = field(default_factory=dict)
    q: Tensor | None = None
    total: Tensor | None = None


class Estimator(ABC):
    """One of the three; holds no state."""

    memories: ClassVar[tuple[str, ...]] = ()
    """Names of what has to be kept of each tensor, and saved, by each worker for itself."""

    @abstractmethod
    def prepare(self, pieces: Sequence[Piece]) -> None:
        """v <- v_i, in place."""

    @abstractmethod
    def finish(self, pieces: Sequence[Piece], scale: float, workers: int, bad: Tensor) -> None:
        """total <- gradient, in place, and the memories move.

        Args:
            pieces: with v, q and total.
            scale: m / k.
            workers: n.
            bad: (), bool: something that was sent is not finite. Then no memory changes, on no worker.
        """


class Unbiased(Estimator):
    """E gradient = mean of the g_i. Keeps nothing."""

    def prepare(self, pieces: Sequence[Piece]) -> None:
        pass

    def finish(self, pieces: Sequence[Piece], scale: float, workers: int, bad: Tensor) -> None:
        torch._foreach_mul_([_given(piece.total) for piece in pieces], scale / workers)


class ErrorFeedback(Estimator):
    """What was not sent is added to the next gradient. Keeps the residual e_i, one copy of the parameters."""

    memories = ("residuals",)

    def prepare(self, pieces: Sequence[Piece]) -> None:
        torch._foreach_add_([piece.v for piece in pieces], [piece.memory["residuals"] for piece in pieces])

    def finish(self, pieces: Sequence[Piece], scale: float, workers: int, bad: Tensor) -> None:
        for piece in pieces:
            residual = piece.memory["residuals"]
            torch.where(bad, residual, piece.v - _given(piece.q), out=residual)
        torch._foreach_div_([_given(piece.total) for piece in pieces], workers)


class ControlVariate(Estimator):
    """Only the difference to what is known of a gradient is sent. Keeps h_i and hbar, two copies of the parameters."""

    memories = ("control_variates", "mean_control_variates")

    def prepare(self, pieces: Sequence[Piece]) -> None:
        torch._foreach_sub_([piece.v for piece in pieces], [piece.memory["control_variates"] for piece in pieces])

    def finish(self, pieces: Sequence[Piece], scale: float, workers: int, bad: Tensor) -> None:
        for piece in pieces:
            own, mean = (piece.memory[name] for name in self.memories)
            total = _given(piece.total)
            new_mean = mean.add(total, alpha=1 / workers)
            total.mul_(scale / workers).add_(mean)  # the old mean
            torch.where(bad, mean, new_mean, out=mean)
            torch.where(bad, own, own + _given(piece.q), out=own)


_ESTIMATORS: dict[str, Estimator] = {
    "unbiased": Unbiased(),
    "error_feedback": ErrorFeedback(),
    "control_variate": ControlVariate(),
}


def make_estimator(name: EstimatorName) -> Estimator:
    """The estimator of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _ESTIMATORS:
        raise ConfigError(f"estimator: allowed are {', '.join(get_args(EstimatorName))}, got {name!r}")
    return _ESTIMATORS[name]


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
