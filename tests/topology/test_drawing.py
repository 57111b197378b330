"""The drawing in characters: every worker is there, and dots lie where the links are."""

from __future__ import annotations

import numpy as np
import pytest

from decent_opt.topology import make_topology
from decent_opt.topology.drawing import draw, links, positions


def test_a_drawing_of_four():
    lines = draw(make_topology("path", 4)).splitlines()
    assert lines[0].strip().startswith("0")
    assert lines[8].startswith("3")
    assert lines[8].endswith("1")
    assert lines[16].strip().endswith("2")
    upper_left = "".join(line[:20] for line in lines[:8])
    assert "." not in upper_left  # no link between 3 and 0
    assert "." in "".join(line[22:] for line in lines[1:8])  # one between 0 and 1


@pytest.mark.parametrize("spec", ["ring", "complete", "base:k=3", "exponential", "hierarchical:group=4"])
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_every_worker_is_in_the_drawing_and_everything_is_ascii(spec, size):
    if size < 4:
        spec = "ring"
    text = draw(make_topology(spec, size))
    assert text.isascii()
    assert sorted(int(word) for word in text.replace(".", " ").split()) == list(range(size))
    assert max(map(len, text.splitlines())) <= 43


def test_the_centre_of_a_star_stands_in_the_middle():
    places = positions(make_topology("star", 6))
    np.testing.assert_array_equal(places[0], [0, 0])
    np.testing.assert_allclose(np.linalg.norm(places[1:], axis=1), 1)


def test_a_schedule_is_drawn_with_the_links_of_all_its_rounds():
    assert links(make_topology("one-peer-exponential", 4)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
