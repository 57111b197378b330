"""Names with options: what they mean, and the sentence for what cannot be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from decent_opt.errors import ConfigError
from decent_opt.topology import make_topology


@pytest.mark.parametrize(
    "spec, same",
    [
        ("torus: 4x2 ", "torus:shape=4x2"),
        (" ring:", "ring"),
        ("ring:weights=metropolis", "ring"),
        ("base", "base:k=1"),
        ("base : k = 2", "base:k=2"),
        ("random-regular", "random-regular:degree=4,seed=0,weights=metropolis"),
        ("random-regular:seed=07", "random-regular:seed=7"),
        ("hierarchical:group=4", "hierarchical:inner=complete,links=1,group=4,outer=ring"),
        ("hierarchical:group=4,outer=base:k=2", "hierarchical:outer=base:k=2,group=4"),
    ],
)
def test_spaces_order_and_defaults_make_no_difference(spec, same):
    one, other = make_topology(spec, 8), make_topology(same, 8)
    assert one.name == spec.strip()
    assert one.period == other.period
    for r in range(one.period):
        np.testing.assert_array_equal(one.matrix(r), other.matrix(r))


@pytest.mark.parametrize(
    "spec, size, sentence",
    [
        ("", 4, "unknown name ''; allowed are ring, complete"),
        ("Ring", 4, "unknown name 'Ring'; allowed are ring, complete"),
        ("tours:4x8", 32, "unknown name 'tours'; allowed are ring, complete"),
        ("ring:degree=4", 8, "ring has no option 'degree'; allowed are weights= (metropolis or uniform)"),
        ("ring:4", 8, "cannot read '4' of ring; allowed are weights= (metropolis or uniform)"),
        ("ring:weights=fast", 8, "weights of ring must be metropolis or uniform, got 'fast'"),
        ("complete:k=1", 8, "complete has no option 'k'; complete takes no options"),
        ("exponential:2", 8, "cannot read '2' of exponential; exponential takes no options"),
        ("torus:4", 8, "shape of torus must be rows x columns, as in 4x8, got '4'"),
        ("torus:0x8", 8, "shape of torus must be rows x columns, as in 4x8, got '0x8'"),
        ("torus:4X2", 8, "shape of torus must be rows x columns, as in 4x8, got '4X2'"),
        ("torus:2x4,4x2", 8, "torus has 'shape' twice; give it once"),
        ("torus:4x8", 16, "torus of 4x8 has 32 places, but there are 16 workers; rows x columns must be their number"),
        ("base:k=0", 8, "k of base must be a whole number from 1 on, got '0'"),
        ("base:k=-1", 8, "k of base must be a whole number from 1 on, got '-1'"),
        ("base:k=1.5", 8, "k of base must be a whole number from 1 on, got '1.5'"),
        ("base:k=", 8, "k of base must be a whole number from 1 on, got ''"),
        ("base:k=\u0663", 8, "k of base must be a whole number from 1 on, got '\u0663'"),
        ("base:k=1,,", 8, "cannot read '' of base; allowed are k= (a whole number from 1 on)"),
        ("base:k=1,k=1", 8, "base has 'k' twice; give it once"),
        ("base:2", 8, "cannot read '2' of base; allowed are k= (a whole number from 1 on)"),
        ("base:k=" + "9" * 5000, 8, "k of base must be a whole number from 1 on, got '999"),
        ("random-regular:degree=8", 8, "degree=8 cannot connect 8 workers; allowed are 2 to 7"),
        ("random-regular:degree=1", 8, "degree=1 cannot connect 8 workers; allowed are 2 to 7"),
        ("random-regular:degree=1", 1, "degree=1 cannot connect 1 workers; allowed are 0"),
        ("random-regular:degree=3", 9, "size x degree to be even, got 9 x 3; use degree=2"),
        ("random-regular:seed=-1", 8, "seed of random-regular must be a whole number from 0 on, got '-1'"),
        ("hierarchical", 8, "hierarchical needs group=..., a whole number from 1 on; write hierarchical:group=4"),
        ("hierarchical:group=3", 8, "group=3 does not divide 8 workers; allowed are 1, 2, 4, 8"),
        ("hierarchical:group=2,links=3", 8, "hierarchical has 2 workers in a group, got links=3"),
        ("hierarchical:group=2,inner=rnig", 8, "inner=rnig of hierarchical: unknown name 'rnig'; allowed are ring"),
        ("hierarchical:group=2,outer=base:k=0", 8, "outer=base:k=0 of hierarchical: k of base must be a whole number"),
        ("hierarchical:group=2,outer=torus:3x2", 8, "outer=torus:3x2 of hierarchical: torus of 3x2 has 6 places"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(spec, size, sentence):
    with pytest.raises(ConfigError, match="^topology: .*" + re.escape(sentence)):
        make_topology(spec, size)
