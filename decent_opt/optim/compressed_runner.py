"""The rounds of CPD-SGDM: public copies and pulls in the optimizer's state, and the order of mixing and sending.

order "paper":   absorb the last round's messages, mix, outer momentum, send;  on their way during the next p steps
order "fresh":   send, absorb, mix, outer momentum
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.compression import Compressor, Identity
from decent_opt.config import DecentConfig
from decent_opt.gossip import CompressedGossip, Mixable, Mixing, not_finite, restart
from decent_opt.gossip.compressed import Part
from decent_opt.monitoring import Monitor
from decent_opt.optim.compressed_setup import first_gamma
from decent_opt.optim.healing import restore_from_copies_
from decent_opt.optim.hyperparameters import AUTO, GAMMA, MATRIX
from decent_opt.optim.own_state import COPY, PULL, REMAINDER
from decent_opt.optim.replica import Replica
from decent_opt.optim.round_runner import RoundRunner
from decent_opt.theory.step_size import BLOCK, AutoGamma, GrowthGuard

logger = logging.getLogger(__name__)


QUIET = 200  # rounds between two warnings of the guard


class Watched:
    """Numbers of an accelerator that the host reads a round later, so that it never waits for them."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def put(self, numbers: Tensor) -> None:
        """Start the copy to the host."""
        self._ready = None
        if numbers.device.type != "cuda":
            self._numbers = numbers
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._ready = torch.cuda.Event()
        self._ready.record()

    def take(self) -> list[float] | None:
        """The numbers, if they have arrived."""
        if self._numbers is None or (self._ready is not None and not self._ready.query()):
            return None
        numbers: list[float] = self._numbers.tolist()
        return numbers


class CompressedRunner(RoundRunner):
    """`RoundRunner` for `algorithm="cpd"`.

    Buffers are not mixed in rounds, as there are no public copies of them; `consensus_` averages them. Where copies and
    pulls do not belong together, because the state is of another W or of PD-SGDM, the next round is an exact average.
    """

    gossip: CompressedGossip

    def __init__(
        self,
        replica: Replica,
        config: DecentConfig,
        transport: Transport,
        gossip: CompressedGossip,
        monitor: Monitor,
        buffers: Callable[[], Sequence[Tensor]],
        compressor: Compressor,
    ) -> None:
        super().__init__(replica, config, transport, gossip, monitor, buffers)
        self.compressor = compressor
        self._watched, self._guard, self._quiet_until = Watched(), GrowthGuard(), 0
        self._block: deque[Tensor] = deque(maxlen=BLOCK)
        self._copies_fit = True
        self._confirmed = True

    @property
    def codec(self) -> str:
        return self.compressor.spec

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the messages on their way and take them in; parameters do not change."""
        round = self.gossip.in_flight
        if round is not None:
            mixing = self.gossip.absorb()
            self._restore(mixing, round)
            self._warn_if_identical(mixing)
            self._watch(round)
            self.record("gossip", round, mixing, self.replica.trainable().values())

    def store_corrections(self) -> None:
        """The same: what is taken in is in the state, and takes effect at the next round."""
        self.settle()

    def check_loaded(self, matrix: str, fresh: bool = False) -> None:
        """Are there copies in the state, and were they made for this W?"""
        state = self.optimizer.state
        begun = [COPY in state.get(p, {}) for p in self.replica.trainable().values()]
        # Copies may begin where the workers are equal: at a start, or where nothing was stepped yet.
        beginning = not any(begun) and (fresh or not state)
        self._copies_fit = beginning or (all(begun) and self.group[MATRIX] == matrix)
        self._confirmed = beginning and fresh
        self._block.clear()
        for group in self.optimizer.param_groups:
            group[MATRIX] = matrix

    def are_equal(self) -> None:
        state = self.optimizer.state
        restart(self._mixables([n for n, p in self.replica.trainable().items() if COPY in state.get(p, {})]))
        self._copies_fit = self._confirmed = True
        self._block.clear()
        if self.group[AUTO] is not None:
            tuner = self._tuner()
            tuner.restart()
            self._keep(tuner)

    def _wants_exact_average(self, round: int) -> bool:
        if not self._confirmed:
            # One rank may have loaded what fits, another what does not: all of them have to do the same.
            self._copies_fit = all(self.transport.gather(self._copies_fit))
            self._confirmed = True
        return not self._copies_fit or super()._wants_exact_average(round)

    def _gossip(self, tensors: dict[str, Tensor], round: int) -> None:
        mixed = list(tensors.values())
        self._admit_unfrozen(tensors, round)
        parts, gamma = self.gossip.cut(self._mixables()), self.group[GAMMA]
        if self.config.order == "fresh":
            self._send(parts, round)
            self.settle()
        self.gossip.mix(parts, gamma)
        self._outer_step(mixed)
        if self.config.order == "paper":
            self._send(parts, round)
        if self.config.gamma == "auto" and len(self._block) == BLOCK:
            self._tune_gamma()

    def _admit_unfrozen(self, mixed: dict[str, Tensor], round: int) -> None:
        """Parameters that are trained since the last round have parted already: average them, then begin their copies.

        All workers have agreed on the layout of this round, so they find the same ones.
        """
        new = {name: p for name, p in mixed.items() if COPY not in self.optimizer.state.get(p, {})}
        if new:
            mixing = self.average_(new, round)
            self.own.create(new.values(), bool(self.group["outer_momentum"]))
            self.record("average", round, mixing, new.values())

    def _send(self, parts: list[Part], round: int) -> None:
        mixing = self.gossip.send(parts, round)
        if mixing.error is not None and mixing.scale is not None:
            norms = torch.stack([mixing.error, mixing.scale]).nan_to_num(nan=0.0, posinf=0.0)
            self._watched.put(norms)
            self._block.append(norms)
            if norms.device.type == "cpu":
                self._restore(mixing, round)

    def _restore(self, mixing: Mixing, round: int) -> None:
        """Own parameters that are not finite come back from the public copies. On an accelerator a round later."""
        bad: list[str] = []
        if mixing.error is not None and not mixing.reported and not bool(mixing.error.isfinite()):
            trainable = self.replica.trainable()
            flags = not_finite(list(trainable.values())).tolist()
            bad = [name for name, flag in zip(trainable, flags, strict=True) if flag]
            for name in bad:
                restore_from_copies_(self.optimizer, trainable[name], self.gossip.peers.self_weight)
        self._mind(bad, mixing, round, all_used=not mixing.empty_from)

    def _tune_gamma(self) -> None:
        """Once in a block of rounds: the workers' mean of what they have seen decides; collective.

        A block that was begun is not saved: after a resume it begins anew, on all workers.
        """
        mean = torch.stack(list(self._block)).mean(dim=0)
        self._block.clear()
        self.transport.average_([mean])
        error, scale = mean.tolist()
        tuner = self._tuner()
        tuner.update(error, scale, self._rate())
        self._keep(tuner)

    def _tuner(self) -> AutoGamma:
        return AutoGamma(first_gamma(self.compressor), self.group[AUTO])

    def _keep(self, tuner: AutoGamma) -> None:
        for group in self.optimizer.param_groups:
            group[GAMMA], group[AUTO] = tuner.gamma, tuner.state

    def _rate(self) -> float:
        return sum(float(group.get("lr", 0.0)) for group in self.optimizer.param_groups)

    def _watch(self, round: int) -> None:
        """Say so, once in a while, when the copies do not follow."""
        found = self._watched.take()
        if found is None:
            return
        error, scale = found
        reason = self._guard.update(error, scale, self._rate())
        if reason is not None and round >= self._quiet_until:
            self._quiet_until = round + QUIET
            gamma = self.group[GAMMA]
            logger.warning(
                "rank %d, round %d: the public copies do not follow, and training will explode: %s; make gamma smaller "
                "(it is %g, try %g), or compress less than %s",
                self.transport.rank,
                round,
                reason,
                gamma,
                gamma / 3,
                self.codec,
            )

    def _mixables(self, names: Collection[str] | None = None) -> list[Mixable]:
        state = self.optimizer.state
        return [
            Mixable(p, state[p][COPY], state[p][PULL], self._compressor_of(name), state[p].get(REMAINDER))
            for name, p in self.replica.trainable().items()
            if names is None or name in names
        ]

    def _compressor_of(self, name: str) -> Compressor:
        return Identity() if any(fnmatchcase(name, pattern) for pattern in self.config.dense) else self.compressor
