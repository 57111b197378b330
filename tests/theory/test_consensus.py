"""The provably stable consensus step size: the numbers of a ring of 8, and its refusals."""

from __future__ import annotations

from math import pi

import numpy as np
import pytest

from decent_opt import ConfigError
from decent_opt.theory.consensus import choco_gamma, choco_rate
from decent_opt.topology import make_topology

RING = make_topology("ring", 8).matrix(0)


@pytest.mark.parametrize(
    ("delta", "gamma", "alpha"), [(2 / pi, 0.01246, 2.96e-4), (0.1, 0.00181, 4.65e-5), (0.01, 0.00018, 4.65e-6)]
)
def test_numbers_of_a_ring_of_8(delta: float, gamma: float, alpha: float) -> None:
    assert choco_gamma(RING, delta) == pytest.approx(gamma, abs=6e-6)
    assert choco_rate(RING, delta) == pytest.approx(alpha, rel=2e-3)


def test_refusals() -> None:
    directed = np.roll(np.eye(3), 1, axis=1) / 2 + np.eye(3) / 2
    for W, delta, text in (
        (directed, 0.5, "topology: .* symmetric"),
        (np.eye(3), 0.5, "topology: .* connected"),
        (RING, 0.0, "delta: .*got 0.0"),
    ):
        with pytest.raises(ConfigError, match=text):
            choco_gamma(W, delta)
