"""What there is to know about a topology before one trains on it: `Facts`, and the texts that show them.

Bytes are models sent times the bytes of a model, per worker and round; the 40 bytes of a message's header are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from decent_opt.topology.base import Topology
from decent_opt.topology.spectrum import beta, rounds_to_reduce, spectral_gap

READABLE = 16  # with more workers neither the matrix nor the drawing fits on a screen


@dataclass(frozen=True)
class Facts:
    """Numbers of a topology.

    Attributes:
        degree: messages that a worker sends in a round, the fewest and the most over workers and rounds.
        messages: messages that a worker sends in a round, on average.
        gap: spectral gap rho, per round.
        beta: ||I - W||_2 in the worst round.
        rounds: rounds until any disagreement has shrunk 100 times.
    """

    name: str
    size: int
    period: int
    degree: tuple[int, int]
    messages: float
    gap: float
    beta: float
    rounds: int


def facts(topology: Topology) -> Facts:
    """Compute them; O(n^3) for each round of a period, and a few times more for a slow graph."""
    degrees = [len(topology.peers(k, r).send) for r in range(topology.period) for k in range(topology.size)]
    return Facts(
        name=topology.name,
        size=topology.size,
        period=topology.period,
        degree=(min(degrees), max(degrees)),
        messages=float(np.mean(degrees)),
        gap=spectral_gap(topology),
        beta=beta(topology),
        rounds=rounds_to_reduce(topology),
    )


def rows(found: Facts, model_bytes: int | None = None) -> list[tuple[str, str]]:
    """The facts as (what, value), with the traffic in bytes if the size of the model is known."""
    low, high = found.degree
    table = [
        ("workers", f"{found.size}"),
        ("period", f"{found.period} round{'s' * (found.period > 1)}"),
        ("degree (models sent per worker and round)", _range(f"{low}", f"{high}", f"{found.messages:.3g}")),
        ("spectral gap, per round", f"{found.gap:.5f}"),
        ("beta = ||I - W||", f"{found.beta:.3f}"),
        ("rounds until 100 x less disagreement", f"{found.rounds}"),
    ]
    if model_bytes is not None:
        sent = [in_bytes(count * model_bytes) for count in (low, high, found.messages)]
        table.append(("bytes sent per worker and round", _range(*sent)))
        all_reduce = 2 * (found.size - 1) / found.size * model_bytes
        table.append(("... by a ring all-reduce, for comparison", in_bytes(all_reduce)))
    return table


def weights_text(topology: Topology, round: int) -> str:
    """W of a round, rounded to three digits, zeros as dots, with the ranks along both sides."""
    cells = [[f"{weight:.3f}".removeprefix("0") if weight else "." for weight in row] for row in topology.matrix(round)]
    width = max(map(len, chain([str(topology.size)], *cells)))
    head = " " * 4 + " ".join(f"{j:>{width}}" for j in range(topology.size))
    lines = [f"{k:>3} " + " ".join(f"{cell:>{width}}" for cell in row) for k, row in enumerate(cells)]
    return "\n".join([head, *lines])


def links_text(topology: Topology, round: int) -> str:
    """Who sends to whom in a round: "0-1" both ways, "0>1" one way."""
    sent = {(k, i) for k in range(topology.size) for i in topology.peers(k, round).send}
    both = {(k, i): f"{k}-{i}" for k, i in sent if k < i and (i, k) in sent}
    one_way = {(k, i): f"{k}>{i}" for k, i in sent if (i, k) not in sent}
    return "  ".join(text for _, text in sorted({**both, **one_way}.items())) or "nobody"


def in_bytes(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point: 12.3 MB; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _range(low: str, high: str, mean: str) -> str:
    return low if low == high else f"{low} to {high}, mean {mean}"
