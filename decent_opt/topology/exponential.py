"""Exponential graphs: worker k sends to the workers 1, 2, 4, ... places ahead of it.

With P the shift by one place and tau = ceil(log2 n):

    static      W   = (I + P^1 + P^2 + P^4 + ... + P^(2^(tau-1))) / (tau + 1)
    one-peer    W_r = (I + P^(2^(r mod tau))) / 2

The static graph has spectral gap 2 / (1 + tau) for even n. The one-peer graph costs one message a round, and
after tau rounds everyone holds the exact average if n is a power of two: each distance has been walked once,
binary digit by digit. For other n the rounds contract without ever being exact. The order is fixed: random
hops are not exact either. The graphs are directed; a mean of shifts is doubly stochastic all the same.
Source: Ying et al., "Exponential graph is provably efficient for decentralized deep training" (2021).
"""

from __future__ import annotations

import numpy as np


def static_exponential(size: int) -> np.ndarray:
    """W of the static graph: everyone hears from tau others in every round."""
    shifts = [np.eye(size), *(_shift(size, hop) for hop in _hops(size))]
    W: np.ndarray = np.mean(shifts, axis=0)
    return W


def one_peer_exponential(size: int) -> list[np.ndarray]:
    """The matrices of one cycle, one hop a round."""
    return [(np.eye(size) + _shift(size, hop)) / 2 for hop in _hops(size) or [0]]


def _hops(size: int) -> list[int]:
    """1, 2, 4, ..., 2^(tau-1): all below n, so no two meet at one worker and none leads back to oneself."""
    return [2**i for i in range((size - 1).bit_length())]


def _shift(size: int, hop: int) -> np.ndarray:
    """P^hop: row k picks worker k - hop, so that everyone sends `hop` places ahead."""
    return np.roll(np.eye(size), hop, axis=0)
