"""One round after the other: what is mixed, the exchange, the outer step, the record; also a round in flight.

every p-th step:  x_k <- sum_j w_kj x_j   (or an exact average every H-th round), then outer momentum
with overlap:     the exchange is started, and its correction is applied when it is due

`CompressedRunner` (compressed_runner.py) replaces the exchange by that of CPD-SGDM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decent_opt.communication import Transport, agreement, ring_all_reduce_bytes
from decent_opt.config import DecentConfig
from decent_opt.errors import NotFinite
from decent_opt.gossip import CompressedGossip, Mixing, OverlappedGossip, PeriodicGossip, apply_corrections, average_
from decent_opt.monitoring import Monitor, RoundRecord
from decent_opt.optim import outer
from decent_opt.optim.healing import clean_state_
from decent_opt.optim.hyperparameters import DUE, GAMMA, MATRIX, ROUND, STEP
from decent_opt.optim.own_state import REMAINDER, OwnState
from decent_opt.optim.replica import Replica, describe
from decent_opt.optim.schedule import is_exact_average

logger = logging.getLogger(__name__)
_LOST = "rank {}, round {}: parameters are finite {}; nothing is left to go on from but a checkpoint"


class RoundRunner:
    """Runs the rounds of one worker.

    Args:
        replica: the optimizer's parameters; its groups carry hyperparameters and counters.
        config, transport, gossip, monitor: see `Rounds`.
        buffers: gives the floating-point buffers that are mixed like parameters.
    """

    def __init__(
        self,
        replica: Replica,
        config: DecentConfig,
        transport: Transport,
        gossip: PeriodicGossip | OverlappedGossip | CompressedGossip,
        monitor: Monitor,
        buffers: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.optimizer, self.replica, self.config = replica.optimizer, replica, config
        self.transport, self.gossip, self.monitor, self._buffers = transport, gossip, monitor, buffers
        self.bucket_bytes = int(config.bucket_mb * 1e6)
        self.own = OwnState(self.optimizer, public_copies=config.algorithm == "cpd")
        self._in_flight: tuple[int, list[Tensor]] | None = None  # (round, tensors) between start and finish
        self._lost_for = 0  # rounds in a row
        self._last_mixed = self._mixed()
        self._layout = describe(self._last_mixed)

    @property
    def group(self) -> dict[str, Any]:
        """The first parameter group, whose entries are in force."""
        return self.optimizer.param_groups[0]

    @torch.no_grad()
    def run(self) -> None:
        """Mix the parameters (and the momenta, if asked for) with the neighbours, or start to."""
        self.settle()
        tensors = self._mixed()
        self._agree_on_layout(tensors)
        round = self.group[ROUND]
        self._set(ROUND, round + 1)
        if not self._wants_exact_average(round):
            self._gossip(tensors, round)
            return
        mixing = self.average_(tensors, round)
        parameters = list(self.replica.trainable().values())
        self.are_equal()
        self._outer_step(parameters)
        self.record("average", round, mixing, parameters)

    def _wants_exact_average(self, round: int) -> bool:
        return is_exact_average(round, self.group["global_every"])

    @torch.no_grad()
    def regroup(
        self, transport: Transport, gossip: PeriodicGossip | OverlappedGossip | CompressedGossip, matrix: str
    ) -> int:
        """Go on among those who are left: an exact average, and copies anew. Return the step of who is furthest."""
        self.transport, self.gossip, self._in_flight, self._lost_for = transport, gossip, None, 0
        self.own.take_corrections()
        counters = transport.gather((self.group[STEP], self.group[ROUND]))
        step, round = (max(pair[i] for pair in counters) for i in range(2))  # type: ignore[index]
        for name, value in ((ROUND, round), (DUE, None), (MATRIX, matrix)):
            self._set(name, value)
        tensors = self._mixed()
        parameters = list(self.replica.trainable().values())
        mixing = self.average_(tensors, round)
        if self.group["outer_momentum"]:
            self.own.create(parameters, outer_momentum=True)
            outer.restart(self.optimizer, parameters)
        self.are_equal()
        self.record("average", round, mixing, parameters)
        return step

    def are_equal(self) -> None:
        """Called when all workers hold the same parameters: after an exact average, and at the end of the warm-up."""

    def check_loaded(self, matrix: str, fresh: bool = False) -> None:
        """Called with a text that tells W apart when there may be another state: a loaded one, or none (`fresh`)."""

    def average_(self, tensors: dict[str, Tensor], round: int) -> Mixing:
        """x <- mean of the workers whose values are finite; collective."""
        began, names, bad = time.perf_counter(), list(tensors), list[int]()
        remainders = self.own.remainders(list(tensors.values()))
        sent, used = average_(self.transport, list(tensors.values()), self.bucket_bytes, remainders, bad.extend)
        mixing = exact_mixing(sent, began)
        self._mind([names[i] for i in bad], mixing, round, all_used=bool((used == 1).all()))
        if bool((used == 0).any()):
            raise NotFinite(_LOST.format(self.transport.rank, round, "on no worker"), mixing.reported, round)
        return mixing

    def _gossip(self, tensors: dict[str, Tensor], round: int) -> None:
        assert not isinstance(self.gossip, CompressedGossip)
        names, mixed = list(tensors), list(tensors.values())
        if isinstance(self.gossip, OverlappedGossip):
            mixing = self.gossip.start(mixed, round, self.own.remainders(mixed))
            self._mind([names[i] for i in mixing.not_finite()], mixing, round)
            self._in_flight = (round, mixed)
            self._set(DUE, self.group[STEP] + self.config.overlap_steps)
            return
        self.gossip.start(mixed, round, self.own.remainders(mixed))
        mixing = self.gossip.finish()
        self._mind([names[i] for i in mixing.not_finite()], mixing, round, all_used=not mixing.empty_from)
        self._see_whether_lost(mixing, round)
        self._warn_if_identical(mixing)
        parameters = list(self.replica.trainable().values())
        self._outer_step(parameters)
        self.record("gossip", round, mixing, parameters)

    def _mind(self, bad: list[str], mixing: Mixing, round: int, all_used: bool = True) -> None:
        """What to do about values that were not finite: own tensors of these names, or other workers'.

        Raises:
            NotFinite: with `on_nonfinite="raise"`.
        """
        mixing.reported = mixing.reported or bad
        if not bad and all_used:
            return
        me, parameters = self.transport.rank, self.replica.parameters()
        found = f"{len(bad)} tensors that are not finite, the first is {bad[0]}" if bad else ""
        if self.config.on_nonfinite == "raise":
            whose = f"rank {me} has {found}" if bad else f"ranks {mixing.empty_from or 'other than this one'} have some"
            raise NotFinite(f"rank {me}, round {round}: parameters are not finite: {whose}", bad, round)
        for name in bad:
            if name in parameters:
                clean_state_(self.optimizer, parameters[name])
        if bad:
            logger.warning(
                "rank %d, round %d: %s; they stay here, the other workers' values replace them, and their moments "
                "begin anew",
                me,
                round,
                found,
            )

    def _see_whether_lost(self, mixing: Mixing, round: int) -> None:
        """Neighbours without finite values are restored by theirs; after as many rounds as workers there is no hope."""
        lost = bool(mixing.reported) and any(bool(flag) for flag in mixing.lost)
        self._lost_for = self._lost_for + 1 if lost else 0
        if self._lost_for >= self.transport.size:
            whose = f"neither here nor on the neighbours, for {self._lost_for} rounds"
            raise NotFinite(_LOST.format(self.transport.rank, round, whose), mixing.reported, round)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the round in flight, if there is one, and apply its corrections, from messages or from the state."""
        if self.group[DUE] is None:
            return
        self._set(DUE, None)
        if self._in_flight is not None:
            round, parameters = self._in_flight
            self._in_flight = None
            assert isinstance(self.gossip, OverlappedGossip)
            mixing = self.gossip.finish()
            self._mind([], mixing, round, all_used=not mixing.empty_from)
            self._see_whether_lost(mixing, round)
            self._warn_if_identical(mixing)
            self._outer_step(parameters)
            self.record("gossip", round, mixing, parameters)
        else:
            stored = self.own.take_corrections()
            parameters = list(stored)
            apply_corrections(parameters, list(stored.values()), self.own.remainders(parameters), self.bucket_bytes)
            self._outer_step(parameters)

    @torch.no_grad()
    def store_corrections(self) -> None:
        """Wait for the round in flight and keep its corrections in the state, to be applied when they are due.

        It needs messages of the neighbours only, so one rank alone may save its state.
        """
        if self._in_flight is not None:
            round, parameters = self._in_flight
            self._in_flight = None
            assert isinstance(self.gossip, OverlappedGossip)
            mixing = self.gossip.finish(into=self.own.put_corrections(parameters))
            self.record("gossip", round, mixing, parameters)

    def _outer_step(self, parameters: Sequence[Tensor]) -> None:
        beta, state = self.group["outer_momentum"], self.optimizer.state
        if not beta:
            return
        for parameter in parameters:
            if outer.X_PREV in state.get(parameter, {}):
                outer.apply_(state[parameter], parameter, beta, state[parameter].get(REMAINDER))
        # A parameter that was unfrozen since joins from here on: its value at the last round is not known.
        self.own.create(self.replica.trainable().values(), outer_momentum=True)

    def _set(self, name: str, value: int | str | None) -> None:
        for group in self.optimizer.param_groups:
            group[name] = value

    def _mixed(self) -> dict[str, Tensor]:
        tensors = self.replica.trainable()
        if self.group["momentum_sync"] == "average":
            tensors |= self.replica.momenta()
        if not self.config.overlap_steps and self.config.algorithm == "pd":
            tensors |= {f"buffer {i}": b for i, b in enumerate(self._buffers())}
        return tensors

    def _agree_on_layout(self, tensors: dict[str, Tensor]) -> None:
        """After a change of what is mixed (freezing, new group, first momenta) compare it once between the ranks.

        What is not mixed any more has drifted apart since the last round: it is averaged exactly, once.
        """
        layout = describe(tensors)
        if layout != self._layout:
            with agreement(self.transport) as claims:
                claims.update(layout)
            left = {f"{i} of what was frozen": t for i, t in enumerate(self.left_behind(tensors))}
            self.average_(left, self.group[ROUND])
            self._layout = layout
        self._last_mixed = tensors

    @property
    def codec(self) -> str | None:
        """What the messages of a round are encoded with; None where parameters are sent."""
        return None

    def left_behind(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Parameters that were mixed in the last round and are not in `tensors`."""
        now = {id(t) for t in tensors.values()}
        known = self.replica.parameters()
        return [t for name, t in self._last_mixed.items() if name in known and id(t) not in now]

    def _warn_if_identical(self, mixing: Mixing) -> None:
        if mixing.identical:
            logger.warning(
                "rank %d: after the first local steps this worker and its neighbours hold exactly the same parameters; "
                "do all ranks train on the same data? Give each its own shard (DistributedSampler, or another seed per "
                "rank)",
                self.transport.rank,
            )

    def record(self, kind: str, round: int, mixing: Mixing, mixed: Iterable[Tensor]) -> None:
        """Pass on what an exchange of these parameters or gradients cost."""
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
                compressor=self.codec if kind == "gossip" else None,
                gamma=self.group[GAMMA] if kind == "gossip" else None,
                error=mixing.error,
                not_finite=mixing.reported,
            )
        )


def exact_mixing(sent: int, began: float) -> Mixing:
    """What an exact average since `began` cost; it does not tell peers apart."""
    seconds = time.perf_counter() - began
    return Mixing(sent={-1: sent}, received={-1: sent}, wait_seconds={-1: seconds})
