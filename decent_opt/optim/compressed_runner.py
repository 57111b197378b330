"""The rounds of CPD-SGDM: public copies and pulls in the optimizer's state, and the order of mixing and sending.

order "paper":   absorb the last round's messages, mix, outer momentum, send;  on their way during the next p steps
order "fresh":   send, absorb, mix, outer momentum
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.compression import Compressor, Identity
from decent_opt.config import DecentConfig
from decent_opt.gossip import CompressedGossip, Mixable, restart
from decent_opt.monitoring import Monitor
from decent_opt.optim.hyperparameters import AUTO, GAMMA
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

    Buffers are not mixed in rounds, as there are no public copies of them; `consensus_` averages them.
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
        self.copies_are_known = True
        """Do all workers' copies and pulls belong together? If not, the next round is an exact average."""

    @property
    def codec(self) -> str:
        return self.compressor.spec

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the messages on their way and take them in; parameters do not change."""
        round = self.gossip.in_flight
        if round is not None:
            mixing = self.gossip.absorb()
            if mixing.empty_from:
                logger.warning(
                    "rank %d: round %d brought nothing from ranks %s, whose parameters are not finite; lower the "
                    "learning rate or gamma",
                    self.transport.rank,
                    round,
                    mixing.empty_from,
                )
            self._warn_if_identical(mixing)
            self._watch(round)
            self.record("gossip", round, mixing, self.replica.trainable().values())

    def store_corrections(self) -> None:
        """The same: what is taken in is in the state, and takes effect at the next round."""
        self.settle()

    def are_equal(self) -> None:
        self.own.create(self.replica.trainable().values(), bool(self.group["outer_momentum"]))
        restart(self._mixables())
        self.copies_are_known = True

    def _wants_exact_average(self, round: int) -> bool:
        return not self.copies_are_known or super()._wants_exact_average(round)

    def _gossip(self, mixed: list[Tensor], round: int) -> None:
        self.own.create(mixed, bool(self.group["outer_momentum"]))  # of parameters that were unfrozen since
        mixables, gamma = self._mixables(), self.group[GAMMA]
        if self.config.order == "fresh":
            self._send(mixables, round)
            self.settle()
        self.gossip.mix(mixables, gamma)
        self._outer_step(mixed)
        if self.config.order == "paper":
            self._send(mixables, round)
        if self.config.gamma == "auto" and len(self._block) == BLOCK:
            self._tune_gamma()

    def _send(self, mixables: list[Mixable], round: int) -> None:
        mixing = self.gossip.send(mixables, round)
        if mixing.error is not None and mixing.scale is not None:
            norms = torch.stack([mixing.error, mixing.scale])
            self._watched.put(norms)
            self._block.append(norms)

    def _tune_gamma(self) -> None:
        """Once in a block of rounds: the workers' mean of what they have seen decides; collective.

        A block that was begun is not saved: after a resume it begins anew, on all workers.
        """
        mean = torch.stack(list(self._block)).mean(dim=0)
        self._block.clear()
        self.transport.average_([mean])
        error, scale = mean.tolist()
        tuner = AutoGamma(self.compressor.gamma / 4, self.group[AUTO])
        gamma = tuner.update(error, scale, self._rate())
        for group in self.optimizer.param_groups:
            group[GAMMA], group[AUTO] = gamma, tuner.state

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

    def _mixables(self) -> list[Mixable]:
        state = self.optimizer.state
        return [
            Mixable(p, state[p][COPY], state[p][PULL], self._compressor_of(name), state[p].get(REMAINDER))
            for name, p in self.replica.trainable().items()
        ]

    def _compressor_of(self, name: str) -> Compressor:
        return Identity() if any(fnmatchcase(name, pattern) for pattern in self.config.dense) else self.compressor
