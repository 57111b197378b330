"""Whatever the graph, schedule and parameters: every element is mixed exactly once, and workers follow the twin.

Hypothesis draws a world of up to 9 workers, mixing matrices, a schedule and a list of parameters (shapes, dtypes,
memory orders; frozen, tied); the workers run as threads, the twin as one float64 array.

How far may they differ? Without rounding not at all. An error of 1 in a local step of one worker spreads linearly, so
a twin with a coordinate of its own for each such error tells how much of it arrives where; the tolerance is the sum
over all of them, with the worst signs, times the unit roundoff u of the dtype and the size of what was rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from decent_opt import PDSGDM
from decent_opt.gossip.message import HEADER_BYTES
from decent_opt.simulation import SGDM, PeriodicTwin
from decent_opt.testing import run_ranks
from decent_opt.topology import NAMES, make_topology

STEPS = 12
EXAMPLES = 10  # for each kind of topology
PHASES = (Phase.generate, Phase.shrink)  # explaining a failure would take minutes
MOMENTUM = 0.5
LRS = (0.1, 0.04)  # of the two parameter groups
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # half a unit in the last place
GUARD = 77.0  # what lies around a parameter in memory, and has to stay there
KINDS = (*NAMES, "graph", "matrix", "schedule")
# Views through which two parameters share their memory.
TIES = ("same", "transposed", "flat")


# -- parameters -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A parameter; `tied` is a second one on the same memory, passed "trainable", "frozen", or not at all ("kept")."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    frozen: bool
    tied: str
    tied_view: str
    tied_first: bool
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def mixed(self) -> bool:
        return not self.frozen or self.tied == "trainable"

    def others_view(self, tensor: Tensor) -> Tensor:
        """How the tied parameter looks at the memory (and at the gradient) of the first."""
        if self.tied_view == "transposed":
            return tensor.permute(tuple(range(tensor.dim()))[::-1])
        if self.tied_view == "flat" and self.layout == "contiguous":
            return tensor.view(-1)
        return tensor

    def allocate(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The memory and the view of it that holds `values`."""
        shape = list(self.shape)
        if self.layout == "transposed":
            memory = torch.full(shape[::-1], GUARD, dtype=self.dtype)
            view = memory.permute(tuple(range(len(shape)))[::-1])
        elif self.layout == "sliced":
            memory = torch.full([2 * s for s in shape], GUARD, dtype=self.dtype)
            view = memory[tuple(slice(None, None, 2) for _ in shape) or ...]
        elif self.layout == "offset" and shape:
            memory = torch.full([shape[0] + 2, *shape[1:]], GUARD, dtype=self.dtype)
            view = memory[1:-1]
        else:
            memory = torch.full(shape, GUARD, dtype=self.dtype)
            view = memory
        view.copy_(values.view(self.shape))
        return memory, view


class Holder:
    """The parameters of one spec on one worker, and all that must be known about them."""

    def __init__(self, spec: Spec, values: Tensor) -> None:
        self.spec = spec
        self.memory, view = spec.allocate(values)
        self.first = Parameter(view, requires_grad=not spec.frozen)
        self.passed = [self.first]
        if spec.tied in ("trainable", "frozen"):
            other = Parameter(spec.others_view(view), requires_grad=spec.tied == "trainable")
            self.passed.insert(0 if spec.tied_first else 1, other)
        elif spec.tied == "kept":
            self.kept = Parameter(spec.others_view(view))
        around = torch.ones(view.shape, dtype=self.memory.dtype)
        self.is_guard = spec.allocate(around)[0] == GUARD

    def set_gradient(self, gradient: Tensor) -> None:
        """Split it unevenly over the parameters that share the memory: their steps add up to the whole."""
        whole = gradient.to(self.spec.dtype).view(self.spec.shape)
        takers = [p for p in self.passed if p.requires_grad]
        for parameter, share in zip(takers, [[1.0], [0.25, 0.75]][len(takers) == 2], strict=False):
            part = whole * share
            parameter.grad = part if parameter is self.first else self.spec.others_view(part)

    def value(self, optimizer: PDSGDM, alone: bool) -> Tensor:
        """The full value in float64: a 16-bit parameter that is mixed has a remainder, exactly one of those tied."""
        value = self.first.detach().double().reshape(-1)
        if not len(value):  # no memory to share: tied ones may have a remainder each
            return value
        remainders = [
            (r if p is self.first else self.spec.others_view(r)).double().reshape(-1)
            for p in self.passed
            if (r := optimizer.state.get(p, {}).get("decent_remainder")) is not None
        ]
        assert len(remainders) == (self.spec.dtype == torch.bfloat16 and self.spec.mixed and not alone)
        return value + remainders[0] if remainders else value

    def check_guards(self) -> None:
        assert bool((self.memory[self.is_guard] == GUARD).all()), "a write beside the parameter"


def specs(dtypes: list[torch.dtype]) -> st.SearchStrategy[Spec]:
    return st.builds(
        Spec,
        shape=st.lists(st.integers(1, 4) | st.integers(0, 3), max_size=3).map(tuple),
        dtype=st.sampled_from(dtypes),
        layout=st.sampled_from(["contiguous", "transposed", "sliced", "offset"]),
        frozen=st.sampled_from([False, False, False, True]),
        tied=st.sampled_from(["", "", "", "trainable", "frozen", "kept"]),
        tied_view=st.sampled_from(TIES),
        tied_first=st.booleans(),
        group=st.integers(0, 1),
    )


# -- worlds -----------------------------------------------------------------------------------------------------


def sizes(kind: str) -> list[int]:
    """The numbers of workers that this kind of topology is drawn for."""
    if kind in ("hypercube", "one-peer-hypercube"):
        return [2, 4, 8]
    if kind in ("torus", "hierarchical"):
        return [2, 3, 4, 6, 8, 9]
    return [*range(3, 10), *([] if kind == "random-regular" else [2, 1])]


@st.composite
def topologies(draw: st.DrawFn, kind: str, n: int) -> Any:
    """What `topology=` takes for n workers: a name with options, a graph, a matrix, or a list of these."""
    if kind == "schedule":
        kinds = st.sampled_from([k for k in KINDS if k != "schedule" and n in sizes(k)])
        return [draw(topologies(draw(kinds), n)) for _ in range(draw(st.integers(2, 3)))]
    if kind == "graph":  # a tree connects, anything may be added
        graph = nx.random_labeled_tree(n, seed=draw(st.integers(0, 999)))
        workers = st.integers(0, n - 1)
        graph.add_edges_from(draw(st.lists(st.tuples(workers, workers).filter(lambda e: e[0] != e[1]), max_size=n)))
        return graph
    if kind == "matrix":  # every doubly stochastic matrix is a mean of permutations (Birkhoff)
        orders = draw(st.lists(st.permutations(range(n)), min_size=1, max_size=3))
        eye = np.eye(n)
        shares = draw(st.lists(st.integers(1, 9), min_size=len(orders) + 2, max_size=len(orders) + 2))
        return np.average([eye, np.roll(eye, 1, axis=0), *(eye[o] for o in orders)], axis=0, weights=shares)
    if kind == "base":
        return f"base:k={draw(st.integers(1, 4))}"
    if kind == "random-regular":
        degree = draw(st.sampled_from([d for d in range(2, n) if n * d % 2 == 0]))
        return f"random-regular:degree={degree},seed={draw(st.integers(0, 99))}"
    if kind == "hierarchical":
        group = draw(st.sampled_from([g for g in range(n, 0, -1) if n % g == 0 and g < n]))
        inner, outer = (draw(st.sampled_from(["ring", "complete", "one-peer-exponential", "base"])) for _ in range(2))
        return f"hierarchical:group={group},inner={inner},outer={outer},links={draw(st.integers(1, group))}"
    return kind + (draw(st.sampled_from(["", ":weights=uniform"])) if kind in ("ring", "path", "star") else "")


@dataclass(frozen=True)
class Case:
    n: int
    topology: Any
    options: dict[str, Any]
    bucket_mb: float
    sync_init: bool
    curvature: float
    specs: list[Spec]
    steps: int = STEPS

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [s.dtype for s in self.specs for _ in range(s.numel)]

    @property
    def mixed(self) -> Tensor:
        """Which coordinates are mixed."""
        return torch.tensor([s.mixed for s in self.specs for _ in range(s.numel)], dtype=torch.bool)

    @property
    def lrs(self) -> Tensor:
        return torch.tensor([LRS[s.group] for s in self.specs for _ in range(s.numel)], dtype=torch.float64)

    def start(self, worker: int) -> Tensor:
        """x of this worker before rank 0's values may be sent to all, as its dtype holds it."""
        x = wave(worker, 0, len(self.dtypes))
        return torch.cat([x.new_zeros(0), *(v.to(s.dtype).double() for s, v in self.split(x))])

    def gradient(self, worker: int, x: Tensor, step: int) -> Tensor:
        """g = a x + b of the worker, step and coordinate."""
        return self.curvature * x + wave(worker, step, len(x))

    def split(self, x: Tensor) -> list[tuple[Spec, Tensor]]:
        return list(zip(self.specs, x.split([s.numel for s in self.specs]), strict=True))

    def build(self, worker: int) -> tuple[list[Holder], PDSGDM]:
        holders = [Holder(spec, values) for spec, values in self.split(self.start(worker))]
        groups = [
            {"params": [p for h in holders for p in h.passed if h.spec.group == index], "lr": lr}
            for index, lr in enumerate(LRS)
        ]
        optimizer = PDSGDM(
            [group for group in groups if group["params"]],
            momentum=MOMENTUM,
            topology=self.topology,
            bucket_mb=self.bucket_mb,
            sync_init=self.sync_init,
            **self.options,
        )
        return holders, optimizer


def wave(worker: int, step: int, d: int) -> Tensor:
    """Numbers in [-1, 1], different for every worker, step and coordinate."""
    return torch.sin(1.0 + 2.3 * worker + 0.7 * step + 1.1 * torch.arange(d, dtype=torch.float64) * (worker + 1))


LIMITS = st.integers(1, 40) | st.integers(40, 400) | st.just(25_000_000)  # bytes


@st.composite
def cases(draw: st.DrawFn, kind: str, dtypes: list[torch.dtype], steps: int = STEPS) -> Case:
    n = draw(st.sampled_from(sizes(kind)))
    period: Any = draw(st.integers(1, 4))
    shortest = period
    if draw(st.booleans()):
        starts = sorted(draw(st.sets(st.integers(1, steps - 1), min_size=1, max_size=2)))
        period = [(start, draw(st.integers(1, 4))) for start in (0, *starts)]
        shortest = min(p for _, p in period)
    options = {
        "period": period,
        "warmup_steps": draw(st.sampled_from([0, 0, 1, 3])),
        "global_every": draw(st.sampled_from([None, None, 1, 2, 3])),
        "outer_momentum": draw(st.sampled_from([0.0, 0.5])),
        "overlap_steps": draw(st.sampled_from([0, *range(shortest + 1)])),
    }
    return Case(
        n=n,
        topology=draw(topologies(kind, n)),
        options=options,
        bucket_mb=draw(LIMITS) / 1e6,
        sync_init=draw(st.booleans()),
        curvature=draw(st.sampled_from([0.0, 0.5])),
        specs=draw(st.lists(specs(dtypes), min_size=1, max_size=5)),
        steps=steps,
    )


# -- workers against the twin -----------------------------------------------------------------------------------


def train(rank: int, case: Case) -> Tensor:
    """One worker; all values after every step: (steps, d)."""
    holders, optimizer = case.build(rank)
    path = []
    for step in range(1, case.steps + 1):
        # As a model does: the gradient at the parameters as they are, without remainders.
        x = torch.cat([h.first.detach().double().reshape(-1) for h in holders])
        for holder, (_, gradient) in zip(holders, case.split(case.gradient(rank, x, step)), strict=True):
            holder.set_gradient(gradient)
        optimizer.step()
        path.append(torch.cat([h.value(optimizer, case.n == 1) for h in holders]))
    optimizer.close()
    for holder in holders:
        holder.check_guards()
    return torch.stack(path)


def starts(case: Case) -> Tensor:
    return torch.stack([case.start(0 if case.sync_init else k) for k in range(case.n)])


def twin(case: Case) -> tuple[Tensor, Tensor]:
    """All workers as one array, (steps, n, d), and the largest momentum of each coordinate."""
    topology = make_topology(case.topology, case.n)
    matrix_form = PeriodicTwin(
        starts(case), case.gradient, SGDM(lr=case.lrs, momentum=MOMENTUM), topology, **case.options
    )
    path, momentum = [], torch.zeros(len(case.dtypes), dtype=torch.float64)
    for _ in range(case.steps):
        matrix_form.step()
        path.append(matrix_form.X)
        momentum = torch.maximum(momentum, matrix_form.rule.state["m"].abs().amax(dim=0))
    return torch.stack(path), momentum


@dataclass
class KickedSGDM(SGDM):
    """SGDM that adds kicks[t] to X at its t-th step."""

    kicks: list[Tensor] = field(default_factory=list)

    def step(self, X: Tensor, G: Tensor) -> Tensor:
        return super().step(X, G) + self.kicks.pop(0)


def growth(case: Case) -> tuple[Tensor, Tensor]:
    """(steps, n, 1): what errors of size 1 in every worker's x, or g, at every step add up to, with the worst signs.

    Coordinate t n + k holds the error of worker k at step t, from where it spreads as the algorithm spreads x.
    """
    n, sources = case.n, case.n * case.steps
    kicks = list(torch.eye(sources, dtype=torch.float64).view(case.steps, n, sources))
    none = [torch.zeros(n, sources, dtype=torch.float64)] * case.steps
    spread = []
    for in_x, in_g in ((kicks, none), (none, kicks)):

        def error(worker: int, x: Tensor, step: int, in_g: list[Tensor] = in_g) -> Tensor:
            return case.curvature * x + in_g[step - 1][worker]

        rule = KickedSGDM(lr=max(LRS), momentum=MOMENTUM, kicks=list(in_x))
        matrix_form = PeriodicTwin(none[0], error, rule, make_topology(case.topology, n), **case.options)
        path = []
        for _ in range(case.steps):
            matrix_form.step()
            path.append(matrix_form.X.abs().sum(dim=1, keepdim=True))
        spread.append(torch.stack(path))
    return spread[0], spread[1]


def tolerance(case: Case, reference: Tensor, momentum: Tensor) -> Tensor:
    """(steps, n, d): see the module's docstring."""
    u = torch.tensor([UNIT[dtype] for dtype in case.dtypes], dtype=torch.float64)
    wide = u.clamp(max=UNIT[torch.float32])  # rounds compute in float32 at least
    size = torch.maximum(reference.abs().amax(dim=(0, 1)), starts(case).abs().amax(dim=0))
    # A local step rounds x once, twice if it is tied. A round weighs and sums n terms; the correction, the split into
    # value and remainder and the outer step (v is at most 4 times as large as x) round 16 times more.
    in_x = (2 * u + (case.n + 16) * wide) * size
    # g is rounded, its share if it is tied, mu m and the sum; a x sees x without its remainder; the warm-up's mean
    # of n is rounded once more.
    in_g = (5 * u + case.n * wide) * momentum + case.curvature * u * size
    by_x, by_g = growth(case)
    return by_x * in_x + by_g * in_g


def check(case: Case) -> None:
    topology = make_topology(case.topology, case.n)
    for r in range(topology.period):
        W = topology.matrix(r)
        assert W.shape == (case.n, case.n) and (W >= 0).all()
        # sums of at most 9 float64 weights
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-14)
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-14)
    paths = torch.stack(run_ranks(train, case.n, "loopback", (case,), timeout=60), dim=1)
    reference, momentum = twin(case)
    error = (paths - reference).abs()
    allowed = tolerance(case, reference, momentum)
    mixed = case.mixed
    worst = (error - allowed)[..., mixed]
    assert bool((worst <= 0).all()), f"{worst.max():.3g} beyond the tolerance, first {(worst > 0).nonzero()[0]}"
    frozen = starts(case)[:, ~mixed].expand(case.steps, -1, -1)
    assert torch.equal(paths[..., ~mixed], frozen)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_follow_the_twin(kind: str) -> None:
    @seed(KINDS.index(kind))  # or all kinds would draw the same schedules
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=PHASES)
    @given(cases(kind, [torch.float32, torch.float64]))
    def for_all(case: Case) -> None:
        check(case)

    for_all()


@pytest.mark.parametrize("kind", ["ring", "one-peer-exponential", "schedule"])
def test_bfloat16_with_its_remainder_follows_the_twin(kind: str) -> None:
    @seed(100 + KINDS.index(kind))
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=PHASES)
    @given(cases(kind, [torch.bfloat16, torch.bfloat16, torch.float32], steps=8))
    def for_all(case: Case) -> None:
        check(case)

    for_all()


# -- exactly once -----------------------------------------------------------------------------------------------


def whole_numbers(worker: int, d: int) -> Tensor:
    """Multiples of 4 up to 500: exact in bfloat16; W x is neither x nor W^2 x anywhere, for 2 to 9 workers."""
    return 4.0 * ((7 * worker**2 + worker + 11 * torch.arange(d, dtype=torch.float64)) % 125)


def one_round(rank: int, items: list[Spec], W: np.ndarray, limit: int, overlap: int) -> tuple[Tensor, int]:
    """Values after one round of W and nothing else, and the bytes that were sent for it."""
    values = whole_numbers(rank, sum(s.numel for s in items)).split([s.numel for s in items])
    holders = [Holder(spec, v) for spec, v in zip(items, values, strict=True)]
    optimizer = PDSGDM(
        [p for h in holders for p in h.passed],
        lr=1.0,
        momentum=0.0,
        period=2,
        topology=W,
        bucket_mb=limit / 1e6,
        overlap_steps=overlap,
        sync_init=False,
    )
    for _ in range(2 + overlap):
        for holder in holders:
            holder.set_gradient(torch.zeros(holder.spec.numel))
        optimizer.step()
    optimizer.close()
    for holder in holders:
        holder.check_guards()
    return torch.cat([h.value(optimizer, False) for h in holders]), optimizer.monitor.bytes_sent


@settings(max_examples=60, deadline=None, derandomize=True, phases=PHASES)
@given(
    st.integers(2, 9),
    st.lists(specs([torch.float32, torch.float64, torch.bfloat16]), min_size=1, max_size=5),
    LIMITS,
    st.integers(0, 1),
)
def test_every_element_is_mixed_exactly_once(n: int, items: list[Spec], limit: int, overlap: int) -> None:
    # W^2 is not W: an element that is mixed twice, or not at all, is off by whole numbers.
    W = 0.75 * np.eye(n) + 0.25 * np.roll(np.eye(n), 1, axis=0)
    results = run_ranks(one_round, n, "loopback", (items, W, limit, overlap), timeout=60)
    mixed = torch.tensor([s.mixed for s in items for _ in range(s.numel)], dtype=torch.bool)
    before = torch.stack([whole_numbers(k, len(mixed)) for k in range(n)])
    after = torch.where(mixed, torch.from_numpy(W) @ before, before)
    twice = torch.from_numpy(W @ W) @ before
    assert bool((after != before)[:, mixed].all()) and bool((after != twice)[:, mixed].all())  # the numbers can tell
    assert torch.equal(torch.stack([values for values, _ in results]), after)
    # One neighbour gets each element once, 16-bit ones in float32; the rest are the headers of the messages.
    payload = sum(s.numel * max(4, s.dtype.itemsize) for s in items if s.mixed)
    messages = {(sent - payload) / HEADER_BYTES for _, sent in results}
    kinds = {s.dtype for s in items if s.mixed and s.numel}
    assert len(messages) == 1
    assert messages == {len(kinds)} if limit > 400 * 8 else min(messages) >= len(kinds)
