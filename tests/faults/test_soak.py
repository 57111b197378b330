"""The short version of benchmarks/soak.py."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak import soak
from decent_opt.testing import RankPool


def test_a_run_with_faults_does_not_grow(ranks: RankPool, tmp_path: Path) -> None:
    for early, late, faults, finite in ranks.run(soak, 4, (600, str(tmp_path)), timeout=100):
        assert faults > 20 and finite
        assert late.resident < 1.05 * early.resident
        assert (late.files, late.threads, late.python_threads, late.groups) == (
            early.files,
            early.threads,
            early.python_threads,
            early.groups,
        )
