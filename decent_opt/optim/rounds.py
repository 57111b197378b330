"""Rounds: everything that one worker does besides the base optimizer's step.

An optimizer step goes: `before_step`, the base optimizer's own step, `after_step`. The latter counts the step and
runs a round when one is due. `Decentralized` calls them in its `step`, `GossipState` from an optimizer's step hooks.
Hyperparameters and the two counters are read from, and kept in, `param_groups[0]`; every group carries a copy.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from decent_opt.communication import Transport, agreement, ring_all_reduce_bytes
from decent_opt.config import DecentConfig
from decent_opt.errors import ConfigError
from decent_opt.gossip import Mixing, PeriodicGossip, average_, broadcast_, make_buckets
from decent_opt.monitoring import Monitor, RoundRecord
from decent_opt.optim import outer
from decent_opt.optim.replica import Replica, describe
from decent_opt.optim.schedule import is_exact_average, period_to_entry, round_is_due
from decent_opt.topology import Topology, make_topology

STEP, ROUND = "decent_step", "decent_round"
_NOTHING = nullcontext()


@runtime_checkable
class LearnsFromAverages(Protocol):
    """A base optimizer that learns from averaged gradients what it uses later, as `SharedMomentAdamW` does."""

    def observe_own_gradients(self) -> None:
        """This worker's own gradients, just before they are averaged."""

    def observe_mean_gradients(self) -> None:
        """The mean of the workers' gradients, just after."""

    def wants_average(self, round: int) -> bool:
        """Should the step that follows this many rounds average gradients, too?"""

    def end_warmup(self, workers: int) -> None:
        """The warm-up's last step is done; `workers` took part."""


class Rounds:
    """One worker's side of PD-SGDM around a base optimizer.

    Args:
        optimizer: the base; its `state` and `param_groups` carry all that must survive.
        config: the options, or what is wrong with them, which the other ranks are told before it is raised.
        transport: this worker's access to the others. Construction is collective.
        monitor: gets a record per exchange.
        buffers: tensors of the model that are no parameters (normalisation statistics): broadcast at construction,
            floating ones averaged where parameters are averaged exactly.
        model: names the parameters in errors.

    Raises:
        ConfigError: a value is not allowed; every rank raises.
        Disagreement: the ranks differ in options, or in names, shapes or dtypes of parameters; every rank raises.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: DecentConfig | ConfigError,
        transport: Transport,
        monitor: Monitor,
        buffers: Sequence[Tensor] = (),
        model: torch.nn.Module | None = None,
    ) -> None:
        self.optimizer, self.transport = optimizer, transport
        self.buffers, self.monitor = list(buffers), monitor
        self.replica = Replica(optimizer, model)
        self._learner = optimizer if isinstance(optimizer, LearnsFromAverages) else None
        with agreement(transport) as claims:
            if isinstance(config, ConfigError):
                raise config
            self.config = config
            self.bucket_bytes = int(config.bucket_mb * 1e6)
            self.enter_hyperparameters()
            topology = make_topology(config.topology, transport.size)
            self.gossip = PeriodicGossip(transport, topology, self.bucket_bytes)
            hyperparameters = {name: self.group[name] for name in (*self._hyperparameters(), STEP, ROUND)}
            claims.update({name: repr(value) for name, value in hyperparameters.items()})
            claims["topology"] = f"{topology.name} {_digest(topology)}"
            claims["base optimizer"] = type(optimizer).__name__
            claims["bucket_mb"] = repr(config.bucket_mb)
            claims["sync_init"] = repr(config.sync_init)
            claims.update(describe(self.replica.parameters()))
            claims["buffers"] = str([tuple(b.shape) for b in self.buffers])
        self._layout = list(describe(self._mixed()).items())
        if self.config.sync_init and transport.size > 1:
            broadcast_(transport, [*self.replica.parameters().values(), *self.buffers], self.bucket_bytes)
        # Parameters whose state holds our entries only, which the base must not see before its own first step.
        self._bare: list[Tensor] = []
        self._entries_ready = False

    @property
    def group(self) -> dict[str, Any]:
        """The first parameter group, which holds the counters and the hyperparameters that are in force."""
        return self.optimizer.param_groups[0]

    @property
    def alone(self) -> bool:
        """A world of one rank: nothing is exchanged, and there is no outer momentum."""
        return self.transport.size == 1

    def enter_hyperparameters(self) -> None:
        """Write hyperparameters and counters into every group that lacks them; the first group's values win."""
        defaults = {**self._hyperparameters(), STEP: 0, ROUND: 0}
        first = self.optimizer.param_groups[0]
        for group in self.optimizer.param_groups:
            for name, value in defaults.items():
                wanted = first.setdefault(name, value)
                if group.setdefault(name, wanted) != wanted:
                    raise ConfigError(
                        f"{name}: a parameter group has {group[name]!r}, the first group has {wanted!r}; "
                        "it is one value for all groups"
                    )
        self._entries_ready = False

    def admit(self, group: dict[str, Any]) -> None:
        """Take in a parameter group that was just added; collective: every rank adds it at the same step."""
        if self.alone:
            return self.enter_hyperparameters()
        added = {id(p) for p in group["params"]}
        new = {name: p for name, p in self.replica.parameters().items() if id(p) in added}
        with agreement(self.transport) as claims:
            self.enter_hyperparameters()
            claims.update(describe(new))
        if self.config.sync_init:
            broadcast_(self.transport, list(new.values()), self.bucket_bytes)

    def _hyperparameters(self) -> dict[str, Any]:
        names = ("warmup_steps", "global_every", "outer_momentum", "momentum_sync")
        config = self.config
        return {"period": period_to_entry(config.period), **{name: getattr(config, name) for name in names}}

    # -- one optimizer step ------------------------------------------------------------------------------------

    @property
    def averages_gradients(self) -> bool:
        """Does the coming step average gradients exactly: in the warm-up, or because the base asks for it?"""
        group = self.optimizer.param_groups[0]
        if self.alone or group[STEP] < group["warmup_steps"]:
            return not self.alone
        return (
            self._learner is not None
            and round_is_due(group[STEP], group["period"], group["warmup_steps"])
            and self._learner.wants_average(group[ROUND])
        )

    def before_step(self) -> None:
        """Create the entries of outer momentum where they are missing: x_prev = x before the first local step."""
        if self._entries_ready:
            return
        if self.group["outer_momentum"] and not self.alone:
            outer.create(self.optimizer, self.replica.trainable().values())
            self._bare = [p for p, entries in self.optimizer.state.items() if _is_bare(entries)]
        self._entries_ready = True

    def own_entries_hidden(self) -> AbstractContextManager[None]:
        """Hide our entries of parameters that the base has not stepped yet, while it does.

        Torch's optimizers make their state for a parameter when `len(state[param]) == 0`.
        """
        return self._hide_bare_entries() if self._bare else _NOTHING

    @contextmanager
    def _hide_bare_entries(self) -> Iterator[None]:
        hidden = {parameter: self.optimizer.state.pop(parameter) for parameter in self._bare}
        try:
            yield
        finally:
            for parameter, entries in hidden.items():
                self.optimizer.state[parameter].update(entries)
            self._bare = [p for p in self._bare if _is_bare(self.optimizer.state[p])]

    def after_step(self) -> None:
        """Count the step; run a round if one is due."""
        group = self.optimizer.param_groups[0]
        step = group[STEP] + 1
        for g in self.optimizer.param_groups:
            g[STEP] = step
        if self.alone:
            return
        if round_is_due(step, group["period"], group["warmup_steps"]):
            self.run_round()
        elif step == group["warmup_steps"]:
            if group["outer_momentum"]:
                outer.restart(self.optimizer, self.replica.trainable().values())
            if self._learner is not None:
                self._learner.end_warmup(self.transport.size)

    def averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure followed by `average_gradients`."""

        def averaged_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.average_gradients()
            return loss

        return averaged_closure

    @torch.no_grad()
    def average_gradients(self, found_inf: Tensor | None = None) -> Tensor:
        """g <- mean of the workers' gradients; return 1 if any worker has found an overflow, else 0 (0-d, float32).

        A parameter without a gradient counts as zero where another worker has one, and keeps None where none has.
        """
        began = time.perf_counter()
        parameters = self.replica.trainable()
        for name, p in parameters.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ConfigError(f"warmup_steps: {name} has a {p.grad.layout} gradient; averaging needs dense ones")
        if self._learner is not None and not (found_inf is not None and bool(found_inf)):
            self._learner.observe_own_gradients()
        missing = [p for p in parameters.values() if p.grad is None]
        device = next(iter(parameters.values())).device
        flags = torch.tensor([float(p.grad is not None) for p in parameters.values()] + [0.0]).to(device)
        if found_inf is not None:
            flags[-1] = found_inf
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        sent = average_(self.transport, [*gradients, flags], self.bucket_bytes)
        if missing:
            someone_has = dict(zip(map(id, parameters.values()), flags.tolist(), strict=False))
            for parameter in missing:
                if not someone_has[id(parameter)]:
                    parameter.grad = None
        self._record("gradient", -1, _exact_mixing(sent, began), gradients)
        overflow = flags[-1] > 0
        if self._learner is not None and not (found_inf is not None and bool(overflow)):
            self._learner.observe_mean_gradients()
        return overflow.float()  # fused optimizers skip on exactly 1

    # -- rounds ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_round(self) -> None:
        """Mix the parameters (and the momenta, if asked for) with the neighbours, then take the outer step."""
        tensors = self._mixed()
        self._agree_on_layout(tensors)
        group, round = self.group, self.group[ROUND]
        parameters = list(self.replica.trainable().values())
        if is_exact_average(round, group["global_every"]):
            began = time.perf_counter()
            sent = average_(self.transport, list(tensors.values()), self.bucket_bytes)
            self._record("average", round, _exact_mixing(sent, began), parameters)
        else:
            self.gossip.start(list(tensors.values()), round)
            self._record("gossip", round, self.gossip.finish(), parameters)
        for g in self.optimizer.param_groups:
            g[ROUND] = round + 1
        if group["outer_momentum"]:
            known = [p for p in parameters if outer.X_PREV in self.optimizer.state.get(p, {})]
            outer.apply_(self.optimizer, known, group["outer_momentum"])
            # A parameter that was unfrozen since joins from here on: its value at the last round is not known.
            self._bare += outer.create(self.optimizer, parameters)
            self._bare = [p for p in self._bare if _is_bare(self.optimizer.state[p])]

    def _mixed(self) -> dict[str, Tensor]:
        tensors = self.replica.trainable()
        return {**tensors, **self.replica.momenta()} if self.group["momentum_sync"] == "average" else tensors

    def _agree_on_layout(self, tensors: dict[str, Tensor]) -> None:
        """After a change of what is mixed (freezing, new group, first momenta) compare it once between the ranks."""
        layout = list(describe(tensors).items())
        if layout != self._layout:
            with agreement(self.transport) as claims:
                claims.update(layout)
            self._layout = layout

    def _record(self, kind: str, round: int, mixing: Mixing, mixed: Iterable[Tensor]) -> None:
        self.monitor.emit(
            RoundRecord(
                kind=kind,
                step=self.group[STEP] + (kind == "gradient"),  # gradients are averaged before their step is counted
                round=round,
                bytes_sent=mixing.sent,
                bytes_received=mixing.received,
                allreduce_bytes=ring_all_reduce_bytes(sum(t.nbytes for t in mixed), self.transport.size),
                encode_seconds=mixing.encode_seconds,
                wait_seconds=mixing.wait_seconds,
                decode_seconds=mixing.decode_seconds,
                distance=mixing.spread if kind == "gossip" else None,
            )
        )

    # -- consensus ---------------------------------------------------------------------------------------------

    def _consensus_tensors(self) -> list[Tensor]:
        floating = [b for b in self.buffers if b.is_floating_point() or b.is_complex()]
        return [*self.replica.trainable().values(), *floating]

    @torch.no_grad()
    def consensus_(self) -> None:
        """x_k <- (1/n) sum_j x_j on every rank, buffers too. Collective."""
        if not self.alone:
            average_(self.transport, self._consensus_tensors(), self.bucket_bytes)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the workers' average inside the block, and every worker's own parameters again after it."""
        tensors = [] if self.alone else self._consensus_tensors()
        own = [t.detach().clone() for t in tensors]
        self.consensus_()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return sqrt((1/n) sum_k ||x_k - xbar||^2), exactly. Collective; costs one all-reduce of the model."""
        square = torch.zeros(1, dtype=torch.float64)
        for bucket in make_buckets(self.replica.trainable().values(), self.bucket_bytes) if not self.alone else []:
            flat = torch.empty(
                bucket.numel, dtype=torch.promote_types(bucket.dtype, torch.float32), device=bucket.device
            )
            bucket.read(flat)
            mean = flat.clone()
            self.transport.average_([mean])
            square += float(torch.linalg.vector_norm(flat.sub_(mean))) ** 2
        reference = next(iter(self.replica.parameters().values()))
        square = square.to(reference.device)
        self.transport.average_([square])
        return float(square.sqrt())


def _is_bare(entries: dict[str, Any]) -> bool:
    return bool(entries) and all(str(key).startswith("decent_") for key in entries)


def _digest(topology: Topology) -> str:
    """Six digits that tell mixing matrices of the same name apart."""
    matrices = b"".join(topology.matrix(r).tobytes() for r in range(topology.period))
    return f"(matrices {hashlib.sha256(matrices).hexdigest()[:6]})"


def _exact_mixing(sent: int, began: float) -> Mixing:
    seconds = time.perf_counter() - began
    return Mixing(sent={-1: sent}, received={-1: sent}, wait_seconds={-1: seconds})
