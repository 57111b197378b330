"""From what a user writes to a topology: a name, a matrix, a graph, a schedule of them, or an object of their own.

make_topology("ring", 8)
make_topology("random-regular:degree=4,seed=1", 32)
make_topology(nx.petersen_graph(), 10)
make_topology([W_even, W_odd], 8)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from decent_opt.errors import ConfigError
from decent_opt.options import Option, choice, read_options, shape, whole
from decent_opt.topology import exponential, finite_time, graphs
from decent_opt.topology.base import CyclicTopology, Topology
from decent_opt.topology.hierarchical import hierarchical
from decent_opt.topology.weights import graph_weights, metropolis_hastings, uniform_weights

# networkx.Graph is one of them too; the name stands in no annotation, so that nobody needs networkx for it
TopologySpec: TypeAlias = "str | ArrayLike | Topology | Sequence[Any]"

_WEIGHTS = {"metropolis": metropolis_hastings, "uniform": uniform_weights}


@dataclass(frozen=True)
class Named:
    """A topology with a name.

    Attributes:
        build: from the number of workers and the options to the matrices of one cycle.
        about: what it is and for which sizes, in a line.
        options: what may stand after the colon.
    """

    build: Callable[..., Sequence[np.ndarray]]
    about: str
    options: tuple[Option, ...] = ()


def _graph(make: Callable[..., Any], about: str, *options: Option) -> Named:
    """A topology that never changes: an undirected graph with the weights of one's choice."""

    def build(size: int, weights: str, **others: Any) -> list[np.ndarray]:
        return [_WEIGHTS[weights](make(size, **others))]

    return Named(build, about, (*options, choice("weights", list(_WEIGHTS))))


def _hierarchical(size: int, group: int, inner: str, outer: str, links: int) -> list[np.ndarray]:
    def part(role: str, spec: str) -> Callable[[int], list[np.ndarray]]:
        def matrices(members: int) -> list[np.ndarray]:
            try:
                return _named(spec, members)
            except ConfigError as error:
                reason = str(error).removeprefix("topology: ")
                raise ConfigError(f"topology: {role}={spec} of hierarchical: {reason}") from None

        return matrices

    return hierarchical(size, group, part("inner", inner), part("outer", outer), links)


NAMED: dict[str, Named] = {
    "ring": _graph(graphs.ring, "everyone between two neighbours"),
    "complete": Named(lambda size: [np.full((size, size), 1 / size)], "everyone with everyone: the exact average"),
    "star": _graph(graphs.star, "everyone with worker 0, which is the bottleneck"),
    "hypercube": _graph(graphs.hypercube, "neighbours differ in one binary digit; powers of two"),
    "exponential": Named(
        lambda size: [exponential.static_exponential(size)], "everyone sends 1, 2, 4, ... places ahead; directed"
    ),
    "one-peer-exponential": Named(
        exponential.one_peer_exponential, "one of these places a round, in turn; exact for powers of two"
    ),
    "path": _graph(graphs.path, "a ring that is cut open"),
    "torus": _graph(graphs.torus, "rows and columns are rings; any size but primes", shape("shape")),
    "one-peer-hypercube": Named(
        finite_time.one_peer_hypercube, "one binary digit a round, in turn; exact; powers of two"
    ),
    "random-regular": _graph(
        graphs.random_regular,
        "everyone has as many neighbours, drawn at random; connected",
        whole("degree", 1, default=None),
        whole("seed", 0, default=0),
    ),
    "base": Named(
        finite_time.base, "Base-(k+1): at most k neighbours a round, exact for any size", (whole("k", 1, default=1),)
    ),
    "hierarchical": Named(
        _hierarchical,
        "hosts of `group` workers: dense inside, a graph between their speakers",
        (
            whole("group", 1),
            Option("inner", str, "the name of a topology", "complete"),
            Option("outer", str, "the name of a topology", "ring"),
            whole("links", 1, default=1),
        ),
    ),
}
NAMES = tuple(NAMED)


def make_topology(spec: TopologySpec, size: int) -> CyclicTopology:
    """The topology that `spec` describes, for `size` workers.

    Args:
        spec: one of `NAMES`, with options after a colon ("torus:4x8", "base:k=2"); or W as an array, tensor or nested
            list (n, n); or an undirected networkx.Graph on the nodes 0 ... n-1, with the weights of its edges or else
            Metropolis-Hastings; or a schedule, one round after the other: an array (period, n, n) or a list of
            matrices, graphs and names; or an object with `name`, `size`, `period` and `matrix(round)`, read over one
            period. Peers follow from the matrices, so that no two workers disagree about who sends to whom.
        size: how many workers there are.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"size: the number of workers must be a whole number from 1 on, got {size!r}")
    topology = spec if isinstance(spec, CyclicTopology) else CyclicTopology(_matrices(spec, size), _name(spec))
    if topology.size != size:
        raise ConfigError(
            f"topology: {topology.name!r} is for {topology.size} workers, but there are {size}; "
            "W must have one row and one column for each"
        )
    return topology


def _name(spec: Any) -> str:
    if isinstance(spec, str):
        return spec.strip()
    return str(spec.name) if hasattr(spec, "matrix") else "custom"


def _matrices(spec: Any, size: int) -> list[np.ndarray]:
    """The matrices of one cycle, not yet checked."""
    if isinstance(spec, str):
        return _named(spec, size)
    if hasattr(spec, "matrix"):
        if not isinstance(spec.period, int) or spec.period < 1:
            raise ConfigError(f"topology: the period must be a whole number from 1 on, got {spec.period!r}")
        return [spec.matrix(round) for round in range(spec.period)]
    if _is_graph(spec):
        return [graph_weights(spec)]
    if isinstance(spec, (list, tuple)) and any(_is_a_round(element) for element in spec):
        return [W for element in spec for W in _matrices(element, size)]
    return _as_matrices(spec)


def _named(spec: str, size: int) -> list[np.ndarray]:
    name, _, text = (piece.strip() for piece in spec.partition(":"))
    if name not in NAMED:
        raise ConfigError(f"topology: unknown name {name!r}; {_allowed()}")
    return list(NAMED[name].build(size, **read_options("topology", name, text, NAMED[name].options)))


def _is_graph(spec: Any) -> bool:
    networkx = sys.modules.get("networkx")  # whoever holds a graph has imported it
    return networkx is not None and isinstance(spec, networkx.Graph)


def _is_a_round(element: Any) -> bool:
    """Whether an element of a list is a whole round, rather than a row of nested lists."""
    return (
        isinstance(element, str) or _is_graph(element) or hasattr(element, "matrix") or getattr(element, "ndim", 0) == 2
    )


def _as_matrices(spec: Any) -> list[np.ndarray]:
    if hasattr(spec, "detach"):  # a tensor, on whatever device and of whatever type
        spec = spec.detach().cpu().double()
    try:
        array = np.asarray(spec, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(())
    if array.ndim == 0:
        raise ConfigError(f"topology: cannot read {spec!r} as a matrix; {_allowed()}")
    return list(array) if array.ndim == 3 else [array]


def _allowed() -> str:
    return f"allowed are {', '.join(NAMES)}, a matrix (n, n) of weights, a networkx.Graph, or a Topology"
