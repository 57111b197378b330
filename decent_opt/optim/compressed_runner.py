"""The rounds of CPD-SGDM: public copies and pulls in the optimizer's state, and the order of mixing and sending.

order "paper":   absorb the last round's messages, mix, outer momentum, send;  on their way during the next p steps
order "fresh":   send, absorb, mix, outer momentum
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from decent_opt.communication import Transport
from decent_opt.compression import Compressor, Identity
from decent_opt.config import DecentConfig
from decent_opt.gossip import CompressedGossip, Mixable, restart
from decent_opt.monitoring import Monitor
from decent_opt.optim.hyperparameters import GAMMA
from decent_opt.optim.own_state import COPY, PULL, REMAINDER
from decent_opt.optim.replica import Replica
from decent_opt.optim.round_runner import RoundRunner

logger = logging.getLogger(__name__)


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
            self.gossip.send(mixables, round)
            self.settle()
        self.gossip.mix(mixables, gamma)
        self._outer_step(mixed)
        if self.config.order == "paper":
            self.gossip.send(mixables, round)

    def _mixables(self) -> list[Mixable]:
        state = self.optimizer.state
        return [
            Mixable(p, state[p][COPY], state[p][PULL], self._compressor_of(name), state[p].get(REMAINDER))
            for name, p in self.replica.trainable().items()
        ]

    def _compressor_of(self, name: str) -> Compressor:
        return Identity() if any(fnmatchcase(name, pattern) for pattern in self.config.dense) else self.compressor
