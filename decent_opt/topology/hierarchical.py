"""Hosts of g workers: dense inside a host, a thin graph between hosts.

    W = (W_inner in every host  +  W_outer between the speakers of the hosts) / 2
      = (I (x) W_inner + W_outer (x) S + I (x) (I - S)) / 2

Worker i of host h is rank h g + i, as torchrun numbers them. The workers i < links of each host speak for it: S is
the identity on them and 0 elsewhere, and the speakers i of all hosts mix by W_outer among themselves. Only they send
to other machines, one model for each speaker and neighbouring host. For doubly stochastic W_inner and W_outer so is
W: the second term is W_outer on speakers and the identity on the others. One host is just W_inner, one worker per
host just W_outer. More links mix the hosts faster and cost that many more bytes between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import numpy as np

from decent_opt.errors import ConfigError


def hierarchical(
    size: int,
    group: int,
    inner: Callable[[int], Sequence[np.ndarray]],
    outer: Callable[[int], Sequence[np.ndarray]],
    links: int = 1,
) -> list[np.ndarray]:
    """The matrices of one cycle; it is as long as it takes the inner and the outer schedule to meet again.

    Args:
        size: how many workers there are, a multiple of `group`.
        group: how many of them are on each host.
        inner: from a number of workers to the matrices of a cycle, used inside each host.
        outer: the same for the hosts.
        links: how many workers of a host speak with other hosts.
    """
    if size % group:
        raise ConfigError(
            f"topology: hierarchical needs hosts of equal size, but group={group} does not divide {size} workers; "
            f"allowed are {', '.join(str(g) for g in range(1, size + 1) if size % g == 0)}"
        )
    if links > group:
        raise ConfigError(
            f"topology: hierarchical has {group} workers in a group, got links={links}; at most all speak"
        )
    hosts = size // group
    within, between = inner(group), outer(hosts)
    if hosts == 1 or group == 1:
        return list(within if hosts == 1 else between)
    speakers = np.diag((np.arange(group) < links).astype(np.float64))
    silent = np.kron(np.eye(hosts), np.eye(group) - speakers)
    return [
        (np.kron(np.eye(hosts), within[r % len(within)]) + np.kron(between[r % len(between)], speakers) + silent) / 2
        for r in range(lcm(len(within), len(between)))
    ]
