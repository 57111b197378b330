"""Rounds: everything that one worker does besides the base optimizer's step.

An optimizer step goes: `before_step`, the base optimizer's own step, `after_step`. The latter counts the step and has
a round run when one is due (`round_runner.py`). `Decentralized` calls them in its `step`, `GossipState` from an
optimizer's step hooks. Hyperparameters and counters are read from, and kept in, `param_groups` (`hyperparameters.py`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decent_opt.communication import DistributedTransport, RollCall, SurvivorsTransport, Transport, agreement
from decent_opt.config import DecentConfig
from decent_opt.errors import ConfigError, PeerLost
from decent_opt.gossip import (
    CompressedGossip,
    HostGossip,
    OverlappedGossip,
    PeriodicGossip,
    average_,
    broadcast_,
)
from decent_opt.gossip.buckets import MIXABLE
from decent_opt.monitoring import Monitor
from decent_opt.optim import consensus, hyperparameters, outer
from decent_opt.optim.compressed_runner import CompressedRunner
from decent_opt.optim.compressed_setup import check_topology, compressor_and_gamma, digests
from decent_opt.optim.gradients import LearnsFromAverages, average_gradients_
from decent_opt.optim.hyperparameters import DUE, ROUND, STEP
from decent_opt.optim.replica import Replica, describe
from decent_opt.optim.round_runner import RoundRunner, exact_mixing
from decent_opt.optim.schedule import round_is_due
from decent_opt.topology import Topology, make_topology

logger = logging.getLogger(__name__)


class Rounds:
    """One worker's side of PD-SGDM around a base optimizer.

    Args:
        optimizer: the base; its `state` and `param_groups` carry all that must survive.
        config: the options, or what is wrong with them, which the other ranks are told before it is raised.
        transport: this worker's access to the others. Construction is collective.
        monitor: gets a record per exchange.
        model: names the parameters in errors. What it has besides them starts equal: buffers (normalisation
            statistics), which are also averaged where parameters are, and parameters that nobody optimizes.
        buffers: stand in for the model's where there is no model.
        inside: with hosts, access to the workers of the own host; `transport` then goes across hosts.
        fresh: start from rank 0's values, if the config says so; not for workers that are copied or loaded.

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
        inside: Transport | None = None,
        fresh: bool = True,
    ) -> None:
        self.optimizer, self.transport, self.inside = optimizer, transport, inside
        self.monitor, self._model, self._buffers = monitor, model, list(buffers)
        self.replica = Replica(optimizer, model)
        self._learner = optimizer if isinstance(optimizer, LearnsFromAverages) else None
        self._gamma: float | None = None
        with agreement(transport) as claims:
            if isinstance(config, ConfigError):
                raise config
            self.config = config
            self.bucket_bytes = int(config.bucket_mb * 1e6)
            for group in optimizer.param_groups[1:]:
                hyperparameters.check_alike(optimizer.param_groups[0], group)
            topology = make_topology(config.topology, transport.size)
            self._matrix = f"{topology.name} {_digest(topology)}"
            compressor = None
            if config.algorithm == "cpd":
                check_topology(topology)
                compressor, self._gamma = compressor_and_gamma(config, topology, self.replica.parameters())
            claims.update({name: repr(value) for name, value in self.enter_hyperparameters().items()})
            gossip = self._make_gossip(topology)
            claims["topology"] = self._matrix
            claims["algorithm"] = config.algorithm
            if compressor is not None:
                claims["compressor"] = compressor.spec
                claims.update({name: repr(getattr(config, name)) for name in ("order", "dense", "seed", "gamma")})
                if fresh and not config.sync_init and transport.size > 1:
                    claims.update(digests(self.replica.parameters()))
            claims["base optimizer"] = type(optimizer).__name__
            claims["bucket_mb"] = repr(config.bucket_mb)
            claims["sync_init"] = repr(config.sync_init)
            claims["buffers"] = repr(config.buffers)
            claims["overlap_steps"] = repr(config.overlap_steps)
            claims["message_dtype"] = repr(config.message_dtype)
            claims["on_peer_loss"] = repr(config.on_peer_loss)
            claims.update(describe(self.replica.parameters()))
            claims.update({f"buffer {i}": f"shape {tuple(b.shape)}, {b.dtype}" for i, b in enumerate(self.buffers)})
            if self._learner is not None:
                claims.update(self._learner.claims(config))
        if inside is not None:
            # Across hosts each rank has asked its counterparts; the ranks of a host have to be alike, too.
            with agreement(inside) as claims:
                claims["config"] = repr(config)
        if self.config.sync_init and fresh and transport.size > 1:
            outside = [] if model is None else list(model.parameters())
            everything = {id(t): t for t in (*self.replica.parameters().values(), *outside, *self.buffers)}
            broadcast_(transport, list(everything.values()), self.bucket_bytes)
        if compressor is None:
            self.runner = RoundRunner(self.replica, self.config, transport, gossip, monitor, self._mixed_buffers)
        else:
            assert isinstance(gossip, CompressedGossip)
            self.runner = CompressedRunner(
                self.replica, self.config, transport, gossip, monitor, self._mixed_buffers, compressor
            )
        self.runner.check_loaded(self._matrix, fresh)
        self._roll, self._quiet_until = self._call_roll(), -1
        self._entries_ready = False
        self.has_data: bool | None = None  # with uneven data: has this worker batches left?
        self.over = False  # with uneven data: no worker has

    def _call_roll(self) -> RollCall | None:
        if self.config.on_peer_loss == "raise" or self.transport.size == 1:
            return None
        with agreement(self.transport):
            problem = None
            if not isinstance(self.transport, DistributedTransport) or self.inside is not None:
                problem = "on processes without hosts"
            elif dist.get_backend(self.transport.group) != dist.Backend.GLOO:
                problem = "on the gloo backend"
            elif not isinstance(self.config.topology, str):
                problem = "with a topology by name, which can be made for any number of workers"
            if problem is not None:
                raise ConfigError(f'on_peer_loss: "continue" works {problem}; use "raise"')
        return RollCall(self.transport, self.config.timeout)

    def close(self) -> None:
        """Complete a round in flight and release the transports."""
        self.runner.settle()
        for part in (self.transport, self.inside, self._roll):
            if part is not None:
                part.close()

    def _make_gossip(self, topology: Topology) -> PeriodicGossip | OverlappedGossip | CompressedGossip:
        if self.config.algorithm == "cpd":
            if self.inside is not None:
                raise ConfigError('algorithm: allowed is "pd" with hosts, got "cpd"')
            return CompressedGossip(self.transport, topology, self.bucket_bytes, self.config.seed)
        overlap = self.config.overlap_steps
        dtype = getattr(torch, self.config.message_dtype) if self.config.message_dtype else None
        if self.inside is None:
            kind = OverlappedGossip if overlap else PeriodicGossip
            return kind(self.transport, topology, self.bucket_bytes, dtype)
        if overlap:
            raise ConfigError(f"overlap_steps: allowed is 0 with hosts, got {overlap}")
        return HostGossip(self.transport, self.inside, topology, self.bucket_bytes, dtype)

    @property
    def group(self) -> dict[str, Any]:
        """The first parameter group, which holds the counters and the hyperparameters that are in force."""
        return self.optimizer.param_groups[0]

    @property
    def _device(self) -> torch.device:
        parameter: Tensor = self.group["params"][0]
        return parameter.device

    @property
    def alone(self) -> bool:
        """A world of one rank: nothing is exchanged, and there is no outer momentum."""
        return self.transport.size == 1

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now: modules may replace theirs."""
        return self._buffers if self._model is None else list(self._model.buffers())

    def enter_hyperparameters(self) -> dict[str, Any]:
        """Write hyperparameters and counters into every group; the first group's win."""
        in_force = hyperparameters.enter(self.optimizer.param_groups, self.config, self._gamma)
        self._entries_ready = False
        self._warming = in_force[STEP] < in_force["warmup_steps"]
        return in_force

    def enter_loaded(self) -> None:
        """After `load_state_dict`: what was loaded is in force from here on."""
        self.enter_hyperparameters()
        self.runner.check_loaded(self._matrix)

    def admit(self, group: dict[str, Any]) -> None:
        """Take in a parameter group that was just added; collective: every rank adds it at the same step."""
        if self.alone:
            hyperparameters.check_alike(self.group, group)
            self.enter_hyperparameters()
            return
        added = {id(p) for p in group["params"]}
        new = {name: p for name, p in self.replica.parameters().items() if id(p) in added}
        with agreement(self.transport) as claims:
            hyperparameters.check_alike(self.group, group)
            self.enter_hyperparameters()
            claims.update(describe(new))
            if self.config.algorithm == "cpd" and not self.config.sync_init:
                claims.update(digests(new))
        if self.config.sync_init:
            broadcast_(self.transport, list(new.values()), self.bucket_bytes)

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
        """Create our entries where they are missing: x_prev = x before the first local step."""
        if not self._entries_ready and not self.alone:
            self.runner.own.create(self.replica.trainable().values(), bool(self.group["outer_momentum"]))
        self._entries_ready = True

    def after_step(self) -> None:
        """Count the step; apply what is due, and run a round if one is due."""
        group = self.optimizer.param_groups[0]
        step = group[STEP] + 1
        for g in self.optimizer.param_groups:
            g[STEP] = step
        if self.alone:
            return
        with self._surviving():
            if group[DUE] is not None and step >= group[DUE]:
                self.runner.settle()
            if self._warming and step >= group["warmup_steps"]:
                self._end_warmup()
            due = round_is_due(step, group["period"], group["warmup_steps"]) and step > self._quiet_until
            if due and self.anyone_goes_on():
                self.runner.run()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """With `on_peer_loss="continue"` the loss of a peer ends the block with an exact average, and no error."""
        try:
            yield
        except PeerLost as error:
            if self._roll is None:
                raise
            self._regroup(error)

    def _regroup(self, error: PeerLost) -> None:
        assert self._roll is not None
        began, before = time.perf_counter(), len(self._roll.members)
        listed, store = self._roll.survivors(error)
        self.transport = SurvivorsTransport(store, listed.index(self._roll.rank), len(listed), self.config.timeout)
        try:
            topology = make_topology(self.config.topology, len(listed))
        except ConfigError:  # a hypercube of seven
            topology = make_topology("ring", len(listed))
        self._matrix = f"{topology.name} {_digest(topology)}"
        # Who learned of the loss early is behind: it has no rounds until it is where the others are now.
        self._quiet_until = self.runner.regroup(self.transport, self._make_gossip(topology), self._matrix)
        logger.warning(
            "rank %d of the start: %s; %d of %d go on as a %s, after %.1f s",
            *(self._roll.rank, error, len(listed), before, topology.name, time.perf_counter() - began),
        )

    def anyone_goes_on(self) -> bool:
        """With uneven data: has any worker still batches? Asked before each exchange; collective then."""
        if self.has_data is None or self.over:
            return not self.over
        active = torch.tensor([float(self.has_data)]).to(self._device)
        self.transport.average_([active])
        self.over = not bool(active)
        return not self.over

    def _end_warmup(self) -> None:
        self._warming = False
        if self.group["outer_momentum"]:
            parameters = list(self.replica.trainable().values())
            self.runner.own.create(parameters, outer_momentum=True)
            outer.restart(self.optimizer, parameters)
        self.runner.are_equal()
        if self._learner is not None:
            self._learner.end_warmup(self.transport.size)

    def averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure followed by `average_gradients`."""

        def averaged_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.average_gradients()
            if isinstance(loss, Tensor):
                # A line search asks the loss how often to call, and that has to be the same everywhere.
                loss = loss.detach().clone().reshape(1)
                self.transport.average_([loss])
                loss = loss[0]
            return loss

        return averaged_closure

    def average_gradients(self, found_inf: Tensor | None = None) -> Tensor:
        """g <- mean of the workers' gradients, if need be of those who are left; see `average_gradients_`."""
        while True:
            with self._surviving():
                return self._average_gradients(found_inf)

    @torch.no_grad()
    def _average_gradients(self, found_inf: Tensor | None) -> Tensor:
        began = time.perf_counter()
        parameters = {name: p for name, p in self.replica.every_parameter().items() if p.requires_grad}
        overflow, sent = average_gradients_(self.transport, parameters, self.bucket_bytes, found_inf, self._learner)
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        self.runner.record("gradient", -1, exact_mixing(sent, began), gradients)
        return overflow

    # -- consensus ---------------------------------------------------------------------------------------------

    def _mixed_buffers(self) -> list[Tensor]:
        return [b for b in self.buffers if b.dtype in MIXABLE] if self.config.buffers == "average" else []

    def _consensus(self) -> tuple[list[Tensor], list[Tensor | None]]:
        trainable = self.replica.trainable()
        tensors = [*trainable.values(), *self.runner.left_behind(trainable), *self._mixed_buffers()]
        return tensors, self.runner.own.remainders(tensors)

    @torch.no_grad()
    def consensus_(self) -> None:
        """x_k <- (1/n) sum_j x_j on every rank, buffers too; a round in flight is completed first. Collective.

        Outer momentum is averaged along: its x_prev would else pull the workers apart again at the next round.
        """
        if self.alone:
            return
        with self._surviving():
            self.runner.settle()
            tensors, remainders = self._consensus()
            state = self.optimizer.state
            outers = [state[t][k] for t in tensors for k in (outer.X_PREV, outer.VELOCITY) if k in state.get(t, {})]
            average_(self.transport, [*tensors, *outers], self.bucket_bytes, [*remainders, *[None] * len(outers)])
            self.runner.are_equal()
            if self.config.buffers == "broadcast":
                broadcast_(self.transport, self.buffers, self.bucket_bytes)

    def averaged(self) -> AbstractContextManager[None]:
        """Hold the workers' average inside the block, and every worker's own values again after it.

        The corrections of a round in flight sum to zero over the workers, so the average needs none of them.
        """
        if self.alone:
            return nullcontext()
        broadcast = self.buffers if self.config.buffers == "broadcast" else []
        return consensus.averaged(self.transport, *self._consensus(), self.bucket_bytes, broadcast)

    def consensus_distance(self) -> float:
        """Return sqrt((1/n) sum_k ||x_k - xbar||^2) of the parameters, exactly. Collective."""
        if self.alone:
            return 0.0
        tensors = list(self.replica.trainable().values())
        return consensus.distance(self.transport, tensors, self.runner.own.remainders(tensors), self.bucket_bytes)


def _digest(topology: Topology) -> str:
    """Six digits that tell mixing matrices of the same name apart."""
    matrices = b"".join(topology.matrix(r).tobytes() for r in range(topology.period))
    return f"(matrices {hashlib.sha256(matrices).hexdigest()[:6]})"
