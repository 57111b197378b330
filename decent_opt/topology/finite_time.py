"""Schedules that end in the exact average: after a period everyone holds the mean, not merely comes closer.

One-peer hypercube, n = 2^tau: in round r worker k pairs with k XOR 2^(r mod tau), W_r = (I + X_r) / 2.

Hyper-hypercube, n = n_1 ... n_L with every n_l <= k + 1: write the rank in the mixed base n_1, ..., n_L; in round l
the n_l workers that differ in digit l only average among themselves. L rounds, at most k neighbours.

Simple Base-(k+1), any n: write n in base k + 1 and give each non-zero digit a part of the workers,

    n = a_1 (k+1)^p_1 + ... + a_L (k+1)^p_L,     p_1 > ... > p_L,     part l = a_l pieces of (k+1)^p_l workers

1. Every part averages itself by its hyper-hypercube: m_1 rounds, as many as the largest part takes.
2. Part 1 hands its mean to the rest: each worker v of the parts 2 ... L pairs with one worker of every piece of
   part 1, with weight w = N_1 / (a_1 N), where N_1 is the size of part 1 and N that of all parts from it on. Now v
   holds (1 - N_1/N) x_v + (N_1/N) mean_1, and every piece has the average of all, though unevenly spread.
3. Each piece of part 1 averages itself once more, p_1 rounds, while part 2 does the same with the parts 3 ... L.

m_1 + 1 + p_1 rounds. Base-(k+1): take the largest divisor s of n whose prime factors are all <= k + 1, build the
simple graph on groups of n / s workers and a hyper-hypercube across the groups, and keep whichever needs fewer rounds.

Workers that a round leaves over stay idle: a message between equal workers would only cost bytes.
Source: Takezawa et al., "Beyond exponential graph: communication-efficient topologies for decentralized learning via
finite-time convergence" (2023), arXiv 2305.11420.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from decent_opt.topology.graphs import check_power_of_two


def one_peer_hypercube(size: int) -> list[np.ndarray]:
    """One partner a round; symmetric, unlike the one-peer exponential graph."""
    check_power_of_two("one-peer-hypercube", size)
    return hyper_hypercube(size, k=1) or []


def hyper_hypercube(size: int, k: int) -> list[np.ndarray] | None:
    """One matrix for each digit of the rank, the lowest digit first; None if `size` has a prime factor above k + 1."""
    factors = _factors(size, min(k + 1, size))
    if factors is None:
        return None
    if not factors:
        return [np.eye(1)]
    # (above this digit) x (this digit) x (below it): the Kronecker product acts on the middle alone
    return [
        np.kron(np.kron(np.eye(prod(factors[i + 1 :])), np.full((f, f), 1 / f)), np.eye(prod(factors[:i])))
        for i, f in enumerate(factors)
    ]


def simple_base(size: int, k: int) -> list[np.ndarray]:
    """The Simple Base-(k+1) graph: the exact average for any size, at most k neighbours a round."""
    smooth = hyper_hypercube(size, k)
    if smooth is not None:
        return smooth
    parts = _parts(size, k + 1)
    averages = [hyper_hypercube(digit * piece, k) or [] for digit, piece in parts]
    again = [hyper_hypercube(piece, k) or [] for _, piece in parts]
    start = np.cumsum([0, *(digit * piece for digit, piece in parts)])
    rounds = []
    for r in range(len(averages[0])):
        W = np.eye(size)
        for part, schedule in enumerate(averages):
            if r < len(schedule):
                W[start[part] : start[part + 1], start[part] : start[part + 1]] = schedule[r]
        rounds.append(W)
    for r in range(1 + len(again[0])):
        W = _hand_over(size, start, r, *parts[r]) if r < len(parts) - 1 else np.eye(size)
        for part in range(min(r, len(parts) - 1)):  # the last part is done with its hand-over
            digit, _ = parts[part]
            if r - part - 1 < len(again[part]):
                inside = np.kron(np.eye(digit), again[part][r - part - 1])
                W[start[part] : start[part + 1], start[part] : start[part + 1]] = inside
        rounds.append(W)
    return rounds


def base(size: int, k: int) -> list[np.ndarray]:
    """The Base-(k+1) graph: the shorter of the simple one and the one that first takes out the small prime factors."""
    simple = simple_base(size, k)
    smooth = _smooth_part(size, k + 1)
    if smooth in (1, size):
        return simple
    # group g holds the workers g * rest ... (g + 1) * rest - 1
    rest = size // smooth
    inside = [np.kron(np.eye(smooth), W) for W in simple_base(rest, k)]
    across = [np.kron(W, np.eye(rest)) for W in hyper_hypercube(smooth, k) or []]
    return min(simple, inside + across, key=len)


def _hand_over(size: int, start: np.ndarray, part: int, digit: int, piece: int) -> np.ndarray:
    """Step 2 from one part to all after it: the i-th worker of the rest pairs with the i-th of every piece."""
    first, rest, everyone = start[part], start[part + 1], size - start[part]
    weight = digit * piece / (digit * everyone)
    W = np.eye(size)
    for i, v in enumerate(range(rest, size)):
        for u in range(first + i, rest, piece):
            W[u, v] = W[v, u] = weight
            W[u, u] = 1 - weight
        W[v, v] = 1 - digit * weight
    return W


@lru_cache(maxsize=1024)
def _factors(size: int, largest: int) -> tuple[int, ...] | None:
    """As few factors of `size` as possible, each from 2 to `largest`; None if there are none."""
    if size == 1:
        return ()
    best: tuple[int, ...] | None = None
    for f in range(min(largest, size), 1, -1):
        others = _factors(size // f, f) if size % f == 0 else None
        if others is not None and (best is None or len(others) + 1 < len(best)):
            best = f, *others
    return best


def _parts(size: int, base: int) -> list[tuple[int, int]]:
    """(digit, power) of the non-zero digits of `size` in this base, the highest first."""
    parts, power = [], 1
    while size:
        size, digit = divmod(size, base)
        if digit:
            parts.append((digit, power))
        power *= base
    return parts[::-1]


def _smooth_part(size: int, largest: int) -> int:
    """The largest divisor of `size` whose prime factors are all at most `largest`."""
    rest = size
    for f in range(2, min(largest, size) + 1):
        while rest % f == 0:
            rest //= f
    return size // rest
