"""A picture of the graph: in characters for the terminal, or as a PNG with matplotlib.

The workers stand on a circle, worker 0 on top; a worker that alone is linked with everybody else stands in its middle.
A schedule is drawn with the links of all its rounds.
"""

from __future__ import annotations

from math import cos, pi, sin
from os import PathLike

import numpy as np

from decent_opt.errors import ConfigError
from decent_opt.topology.base import Topology

_ROWS, _COLUMNS = 17, 41  # a character is about twice as high as wide, and 16 labels must not touch


def draw(topology: Topology) -> str:
    """The graph in ASCII: ranks, and dots along the links. Up to 16 workers or so can be told apart."""
    canvas = [[" "] * (_COLUMNS + 2) for _ in range(_ROWS)]
    places = [
        (round((1 - y) / 2 * (_ROWS - 1)), round((1 + x) / 2 * (_COLUMNS - 1))) for x, y in positions(topology).tolist()
    ]
    for k, i in links(topology):
        steps = max(abs(places[k][0] - places[i][0]), abs(places[k][1] - places[i][1]), 1)
        for step in range(0, steps + 1, 2 if abs(places[k][0] - places[i][0]) * 2 < steps else 1):
            row, column = (round(a + (b - a) * step / steps) for a, b in zip(places[k], places[i], strict=True))
            canvas[row][column] = "."
    for rank, (row, column) in enumerate(places):
        canvas[row][column : column + len(str(rank))] = str(rank)
    return "\n".join("".join(line).rstrip() for line in canvas).strip("\n")


def save_png(topology: Topology, path: str | PathLike[str]) -> None:
    """The same picture as a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "png: needs matplotlib, which is not installed (pip install matplotlib); up to 16 workers are drawn in text"
        ) from None
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    places = positions(topology)
    for k, i in links(topology):
        axes.plot(places[[k, i], 0], places[[k, i], 1], color="0.6", linewidth=1, zorder=1)
    size = 400 if topology.size <= 32 else 12000 / topology.size
    axes.scatter(places[:, 0], places[:, 1], s=size, color="tab:blue", zorder=2)
    if topology.size <= 64:
        for rank, (x, y) in enumerate(places.tolist()):
            axes.annotate(str(rank), (x, y), ha="center", va="center", color="white", fontsize=8)
    axes.set_title(f"{topology.name}, {topology.size} workers")
    axes.set_aspect("equal")
    axes.set_axis_off()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(
            f"png: cannot write {str(path)!r} ({error.strerror}); give a file in a folder that exists"
        ) from None


def links(topology: Topology) -> list[tuple[int, int]]:
    """The pairs that exchange something in any round, in whichever direction."""
    W = sum(topology.matrix(r) for r in range(topology.period))
    return [(int(k), int(i)) for k, i in np.argwhere(np.triu(W + np.transpose(W), 1))]


def positions(topology: Topology) -> np.ndarray:
    """x and y of every worker, from -1 to 1."""
    size = topology.size
    degree = np.bincount(np.array(links(topology), dtype=int).ravel(), minlength=size)
    centre: list[int] = np.flatnonzero(degree == size - 1).tolist() if size > 3 else []
    around = [k for k in range(size) if len(centre) != 1 or k != centre[0]]
    places = np.zeros((size, 2))
    for i, k in enumerate(around):
        angle = 2 * pi * i / len(around)
        places[k] = sin(angle), cos(angle)
    return places
