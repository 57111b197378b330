"""What a topology is: a sequence of mixing matrices that repeats.

    round r:   x_k <- sum_j W_r[k, j] x_j,      W_r = matrices[r mod period]

A graph that never changes is a cycle of one matrix. Each W_r is doubly stochastic, so a round keeps the
average of the workers; over the rounds everyone hears from everyone, so that all are led to that average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decent_opt.errors import ConfigError
from decent_opt.topology.validation import check_consensus, check_doubly_stochastic


@dataclass(frozen=True)
class Peers:
    """One worker's part in one round.

    Attributes:
        self_weight: W[k, k], the weight of worker k's own parameters.
        receive: whom k hears from: the ranks j != k with W[k, j] > 0 in order, each with that weight.
        send: who hears from k: the ranks i != k with W[i, k] > 0 in order.
    """

    self_weight: float
    receive: dict[int, float]
    send: tuple[int, ...]


class Topology(Protocol):
    """Who mixes with whom in each round; the schedule repeats after `period` rounds."""

    name: str
    size: int
    period: int

    def matrix(self, round: int) -> np.ndarray:
        """W of this round: (n, n), float64, doubly stochastic; row = receiver."""
        ...

    def peers(self, rank: int, round: int) -> Peers:
        """Whom worker `rank` hears from and sends to in this round."""
        ...


class CyclicTopology:
    """The topology of a cycle of matrices, one a round. What cannot work is refused at construction."""

    def __init__(self, matrices: Sequence[np.ndarray], name: str) -> None:
        self._matrices = tuple(np.array(W, dtype=np.float64) for W in matrices)
        check_doubly_stochastic(self._matrices)
        check_consensus(self._matrices)
        for W in self._matrices:
            W.flags.writeable = False  # `matrix` hands out the array itself
        self.name = name
        self.size = len(self._matrices[0])
        self.period = len(self._matrices)
        self._peers: dict[tuple[int, int], Peers] = {}

    def matrix(self, round: int) -> np.ndarray:
        """W of this round, read-only."""
        return self._matrices[round % self.period]

    def peers(self, rank: int, round: int) -> Peers:
        """Row `rank` of W says whom to hear from, column `rank` whom to send to; read once, then kept."""
        key = rank, round % self.period
        if key not in self._peers:
            self._peers[key] = self._read_peers(*key)
        return self._peers[key]

    def _read_peers(self, rank: int, round: int) -> Peers:
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank: {rank} is no worker of {self}; allowed are 0 to {self.size - 1}")
        W = self._matrices[round]
        receive = {int(j): float(W[rank, j]) for j in np.flatnonzero(W[rank]) if j != rank}
        send = tuple(int(i) for i in np.flatnonzero(W[:, rank]) if i != rank)
        return Peers(float(W[rank, rank]), receive, send)

    def __repr__(self) -> str:
        return f"CyclicTopology({self.name!r}, size={self.size}, period={self.period})"
