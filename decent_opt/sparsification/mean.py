"""The mean of the workers' gradients from m/n blocks, as one call: for training loops and optimizers without DDP.

    mean = BlockMean(numel)
    mean.mean_(gradient)                  # flat, this worker's own before, everybody's estimate after

Step t of it draws with number t, from 0; what v_i and the gradient are is up to the estimator:

    v_i from g_i;    S = sum_i (v_i)_{U_i};    gradient from S          (see `sparsification.estimators`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decent_opt.communication import Traffic, Transport, agreement, connect
from decent_opt.compression.base import wide
from decent_opt.errors import ConfigError
from decent_opt.sparsification.estimators import EstimatorName, Piece, make_estimator
from decent_opt.sparsification.exchange import Aggregation, BlockExchange
from decent_opt.sparsification.sampler import BlockSampler, Masks


class BlockMean:
    """The mean of one flat vector over the workers, of which each sends a share of the blocks.

    Construction is collective. In a world of one with tau = 1 a vector stays as it is.

    Args:
        numel: d, elements of the vector.
        tau: share of the blocks that a worker sends, in (0, 1]; None: 1 / n.
        estimator: "unbiased", "error_feedback" or "control_variate".
        masks: "independent", "permutation" (disjoint) or "shared"; see `BlockSampler`.
        block: elements of a block, which shrinks until there are 4 / tau of them; or the lengths of all blocks.
        seed: of the draws.
        aggregation: "gather" or "server"; see `exchange`.
        transport: to the other workers; None: found by `connect`.

    Attributes:
        steps: taken so far.
        sampler: the draws.

    Raises:
        ConfigError, Disagreement: an option that is not allowed, or that others have not; on every rank.
    """

    def __init__(
        self,
        numel: int,
        tau: float | None = None,
        estimator: EstimatorName = "unbiased",
        *,
        masks: Masks = "independent",
        block: int | Sequence[int] = 1024,
        seed: int = 0,
        aggregation: Aggregation = "gather",
        transport: Transport | None = None,
    ) -> None:
        self._transport = connect() if transport is None else transport
        size = self._transport.size
        with agreement(self._transport) as claims:
            self._exchange = BlockExchange(self._transport, aggregation)
            self._estimator = make_estimator(estimator)
            if isinstance(numel, bool) or not isinstance(numel, int) or numel < 1:
                raise ConfigError(f"numel: must be a positive whole number of elements, got {numel!r}")
            share = 1 / size if tau is None else tau
            self.sampler = BlockSampler.over(numel, share, block=block, masks=masks, seed=seed)
            own: dict[str, object] = {"numel": numel, "tau": share, "estimator": estimator, "masks": masks}
            own["block"] = block if isinstance(block, int) else tuple(block)
            claims.update({name: repr(v) for name, v in {**own, "seed": seed, "aggregation": aggregation}.items()})
        self.numel, self.steps = numel, 0
        self._memory: dict[str, Tensor] = {}
        self._compared = False

    @property
    def traffic(self) -> Traffic:
        """Of the last step."""
        return self._exchange.traffic

    @torch.no_grad()
    def mean_(self, gradient: Tensor) -> Tensor:
        """Overwrite this worker's gradient, (d,), with the estimate of the mean, bit-equal on all; collective.

        16-bit gradients are computed and sent in float32. Where one that is sent is not finite, on any worker, the
        estimate is not either, and no memory changes.

        Raises:
            ConfigError: the shape is another, or (at the first step and after loading) workers are at different steps.
            PeerLost: a worker does not take part in time.
        """
        self._compare(gradient)
        v = gradient.to(wide(gradient.dtype), copy=True).contiguous()
        for name in self._estimator.memories:
            memory = self._memory.get(name)
            self._memory[name] = torch.zeros_like(v) if memory is None else memory.to(v)
        piece = Piece(v, self._memory)
        self._estimator.prepare([piece])
        if self._memory:
            # A memory must not learn what is not finite, on any worker: then all that this one sends says so.
            least, most = torch.aminmax(v)
            v.add_(least * 0 + most * 0)
            piece.q = torch.empty_like(v)
        total = piece.total = self._exchange.sum(self.sampler, v, self.steps, piece.q)
        bad = total.isfinite().all().logical_not() if self._memory else total.new_zeros((), dtype=torch.bool)
        self._estimator.finish([piece], self.sampler.scale, self._transport.size, bad)
        self.steps += 1
        return gradient.copy_(total)

    def _compare(self, gradient: Tensor) -> None:
        """All workers at one step and with one dtype: messages do not say, and a wrong sum would go unnoticed."""
        if self._compared:
            if gradient.shape != (self.numel,):
                raise ConfigError(f"gradient: has to be flat with {self.numel} elements, got {tuple(gradient.shape)}")
            return
        with agreement(self._transport) as claims:
            if gradient.shape != (self.numel,):
                raise ConfigError(f"gradient: has to be flat with {self.numel} elements, got {tuple(gradient.shape)}")
            claims.update(step=str(self.steps), dtype=str(gradient.dtype))
        self._compared = True

    # -- saving ------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, int]:
        sampler, transport = self.sampler, self._transport
        own = {
            "numel": self.numel,
            "blocks": sampler.blocks.count,
            "kept": sampler.kept,
            "seed": sampler.seed,
        }
        return {"rank": transport.rank, "workers": transport.size, **own}

    def state_dict(self) -> dict[str, Any]:
        """Tensors (d,) and numbers. Workers differ in their memories: save one per rank."""
        return {**self._identity(), "steps": self.steps, **{name: m.clone() for name, m in self._memory.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of the same rank said; every rank has to load its own of the same step.

        Raises:
            ConfigError: of another configuration, rank or number of workers. Nothing was changed then.
        """
        for name, value in self._identity().items():
            if state_dict.get(name) != value:
                raise ConfigError(f"state_dict: {name} is {state_dict.get(name)}, but here it is {value}")
        memory = {name: m.clone() for name, m in state_dict.items() if isinstance(m, Tensor)}
        if state_dict["steps"] and set(memory) != set(self._estimator.memories):
            found, needed = ", ".join(memory) or "nothing", ", ".join(self._estimator.memories) or "nothing"
            raise ConfigError(f"state_dict: it remembers {found}, but the estimator here needs {needed}")
        self.steps, self._memory, self._compared = state_dict["steps"], memory, False
