"""ISAGA: linear models from finite data, by SAGA whose workers each send m/n blocks ("99% of Distributed Optimization
is a Waste of Time", arXiv 1901.09437).

    f(x) = (1/n) sum_i f_i(x),     f_i(x) = (1/l) sum_j phi(a_j . x, b_j) + l2/2 ||x||^2

    worker i draws j:     s = phi'(a_j . x, b_j)
                          v_i = (s - t_j) a_j + (1/l) sum_r t_r a_r + l2 x
                          x <- x - lr/n sum_i (v_i)_{U_i};     t_j <- s

A sample's gradient is a number times its row, so the table holds one number t_j for each sample instead of a vector,
and the penalty needs none: its gradient is known at x.

    data="distributed"    every worker has rows of its own and a table of its own, refreshed in full at no traffic.
                          Reaches the optimum only if grad f_i = 0 there for every worker; else it stalls near it.
    data="shared"         all workers have all rows. A drawn sample's s travels along with the blocks, so that all
                          tables stay equal. Nothing is asked of the gradients at the optimum.

A table of vectors that all keep alike could only be refreshed in the blocks that were sent; one number says all of it,
so t_j is refreshed wholly. lr is by default `theory.isaga_step`, a rule of thumb; `theory.isaga_safe_step` has a proof.
It is not a `torch.optim.Optimizer`: SAGA needs to draw the samples itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from decent_opt.communication import Traffic, Transport, agreement, connect
from decent_opt.compression.base import Key
from decent_opt.errors import ConfigError
from decent_opt.sparsification import Aggregation, BlockExchange, BlockSampler, Masks
from decent_opt.theory import isaga_step

Loss = Literal["squared", "logistic"]
Data = Literal["distributed", "shared"]
_SAMPLES = 1  # the tensor in the key of what draws samples; blocks have 0


class ISAGA:
    """One worker of ISAGA. Construction and steps are collective; x has the same bits on all workers.

        solver = ISAGA(features, labels, loss="logistic", l2=1e-3)
        for _ in range(10_000):
            solver.step()

    Args:
        features: a, (l, d), float32 or float64, on any device: this worker's rows, or all of them ("shared").
        labels: b, (l,); for "logistic" -1 or 1.
        loss: "squared", (z - b)^2 / 2, or "logistic", log(1 + exp(-b z)).
        l2: of the penalty.
        lr: the step size; None: `theory.isaga_step` with the L of the least smooth sample of all workers.
        tau: share of the blocks that a worker sends, in (0, 1]; None: 1 / n.
        data: "distributed" or "shared"; see the module.
        x0: (d,), rank 0's counts; None: zeros.
        masks, block, aggregation, seed, transport: as for `BlockMean`; the seed also draws the samples.

    Attributes:
        x: (d,).
        table: t, (l,), zeros at first.
        steps: taken so far.
        lr: the step size.

    Raises:
        ConfigError, Disagreement: an option or data that are not allowed, or not as on other ranks; on every rank.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        loss: Loss = "squared",
        l2: float = 0.0,
        lr: float | None = None,
        tau: float | None = None,
        data: Data = "distributed",
        x0: Tensor | None = None,
        masks: Masks = "independent",
        block: int | Sequence[int] = 1024,
        aggregation: Aggregation = "gather",
        seed: int = 0,
        transport: Transport | None = None,
    ) -> None:
        self._transport = connect() if transport is None else transport
        self.loss, self.l2, self.data, self.seed = loss, l2, data, seed
        with agreement(self._transport) as claims:
            self._exchange = BlockExchange(self._transport, aggregation)
            _check(features, labels, loss, l2, lr, data, x0)
            share = 1 / self._transport.size if tau is None else tau
            dimension = features.shape[1]
            self.sampler = BlockSampler.over(dimension, share, block=block, masks=masks, seed=seed)
            own: dict[str, object] = {"loss": loss, "l2": l2, "lr": lr, "tau": share, "data": data, "masks": masks}
            own["block"] = block if isinstance(block, int) else tuple(block)
            own.update(aggregation=aggregation, seed=seed, columns=dimension, dtype=features.dtype)
            if data == "shared":
                own["rows"] = f"{len(labels)} of digest {_digest(features, labels)}"
            claims.update({name: repr(value) for name, value in own.items()})
        self.features, self.labels = features.detach(), labels.detach().to(features)
        self.lr = self._default_lr() if lr is None else float(lr)
        self.x = self.features.new_zeros(dimension) if x0 is None else x0.detach().to(self.features, copy=True)
        self._transport.broadcast_([self.x])
        self.table, self._mean = self.labels.new_zeros(len(labels)), torch.zeros_like(self.x)
        self.steps, self._compared = 0, False

    @property
    def traffic(self) -> Traffic:
        """Of the last step."""
        return self._exchange.traffic

    def drawn(self, step: int, rank: int) -> int:
        """Which of its samples a worker draws in this step, from 0: a function of seed, step and rank alone."""
        generator = Key(self.seed, step, rank, _SAMPLES).generator()
        return int(torch.randint(len(self.table), (1,), generator=generator))

    @torch.no_grad()
    def step(self) -> None:
        """One step of all workers; collective.

        Raises:
            Disagreement: at the first step and after loading: workers are at different steps.
            PeerLost: a worker does not take part in time. Nothing has changed then.
        """
        self._compare_steps()
        rank, n = self._transport.rank, self._transport.size
        own = self.drawn(self.steps, rank)
        row = self.features[own]
        slope = self._slope(row @ self.x, self.labels[own])
        v = (self._mean + self.l2 * self.x).add_(row * (slope - self.table[own]))
        if self.data == "shared":
            total, slopes = self._exchange.sum_and_gather(self.sampler, v, self.steps, slope.view(1))
            samples = [self.drawn(self.steps, worker) for worker in range(n)]
        else:
            total, slopes = self._exchange.sum(self.sampler, v, self.steps), slope.view(1, 1)
            samples = [own]
        # One after the other, in the order of the ranks: two workers may have drawn the same sample.
        for sample, new in zip(samples, slopes.view(-1), strict=True):
            self._mean.add_(self.features[sample] * ((new - self.table[sample]) / len(self.table)))
            self.table[sample] = new
        self.x.sub_(total, alpha=self.lr / n)
        self.steps += 1
        if self.steps % len(self.table) == 0:
            # Sums of many small changes drift, which would move the optimum; anew, it costs a row a step on average.
            self._mean = self.table @ self.features / len(self.table)

    def _slope(self, z: Tensor, b: Tensor) -> Tensor:
        """phi'(z, b)."""
        return z - b if self.loss == "squared" else -b * torch.sigmoid(-b * z)

    def _default_lr(self) -> float:
        bend = 1.0 if self.loss == "squared" else 0.25
        own = bend * float(self.features.square().sum(dim=1).max()) + self.l2
        smoothness = max(cast(list[float], self._transport.gather(own)))
        if not smoothness:
            raise ConfigError("lr: features are zero on all workers, so there is no default; give a number")
        return isaga_step(smoothness, self._transport.size, self.sampler.kept / self.sampler.blocks.count)

    def _compare_steps(self) -> None:
        """All workers at one step: messages do not say, and a wrong sum would go unnoticed."""
        if not self._compared:
            with agreement(self._transport) as claims:
                claims["step"] = str(self.steps)
            self._compared = True

    # -- saving ------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, float]:
        blocks = {"columns": len(self.x), "blocks": self.sampler.blocks.count, "kept": self.sampler.kept}
        own = {
            "workers": self._transport.size,
            "rows": len(self.table),
            "seed": self.seed,
            "lr": self.lr,
            "l2": self.l2,
        }
        # Where data are shared, the state of any worker is that of all.
        return {**own, **blocks, **({} if self.data == "shared" else {"rank": self._transport.rank})}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers; with distributed data every worker's own, so save one per rank."""
        tensors = {"x": self.x, "table": self.table, "mean": self._mean}
        return {**self._identity(), "steps": self.steps, **{name: t.clone() for name, t in tensors.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of the same rank said; every rank has to load its own of the same step.

        Raises:
            ConfigError: of another configuration, rank or number of workers. Nothing was changed then.
        """
        for name, value in self._identity().items():
            if state_dict.get(name) != value:
                raise ConfigError(f"state_dict: {name} is {state_dict.get(name)}, but here it is {value}")
        self.x, self.table, self._mean = (state_dict[name].to(self.x, copy=True) for name in ("x", "table", "mean"))
        self.steps, self._compared = state_dict["steps"], False


def _check(features: Tensor, labels: Tensor, loss: str, l2: float, lr: float | None, data: str, x0: object) -> None:
    """Raise a ConfigError for what this worker alone can tell is wrong."""
    if loss not in get_args(Loss):
        raise ConfigError(f"loss: allowed are {', '.join(get_args(Loss))}, got {loss!r}")
    if data not in get_args(Data):
        raise ConfigError(f"data: allowed are {', '.join(get_args(Data))}, got {data!r}")
    if not _is_number(l2) or l2 < 0:
        raise ConfigError(f"l2: must be a finite number from 0 on, got {l2!r}")
    if lr is not None and not (_is_number(lr) and lr > 0):
        raise ConfigError(f"lr: must be a finite number above 0, or None, got {lr!r}")
    if features.dim() != 2 or not features.numel() or features.dtype not in (torch.float32, torch.float64):
        got = f"shape {tuple(features.shape)} and {features.dtype}"
        raise ConfigError(f"features: must be rows of one length, float32 or float64, at least one, got {got}")
    if labels.shape != features.shape[:1]:
        raise ConfigError(f"labels: must be one per row, {len(features)}, got shape {tuple(labels.shape)}")
    if loss == "logistic" and not bool((labels.abs() == 1).all()):
        raise ConfigError("labels: must be -1 or 1 for the logistic loss")
    if x0 is not None and not (isinstance(x0, Tensor) and x0.shape == features.shape[1:]):
        raise ConfigError(f"x0: must be a tensor of shape ({features.shape[1]},), got {getattr(x0, 'shape', x0)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _digest(*tensors: Tensor) -> str:
    """Tells data apart: workers that were to share all rows and were given parts of them would go wrong in silence."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()
