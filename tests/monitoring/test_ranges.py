"""A profile shows the phases of a round; without a profiler they cost next to nothing."""

from __future__ import annotations

import timeit

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from decent_opt import PDSGDM
from decent_opt.monitoring.ranges import phase
from decent_opt.testing import run_ranks

PHASES = ("decent_opt::encode", "decent_opt::wait", "decent_opt::decode")


def profiled(rank: int) -> dict[str, int]:
    optimizer = PDSGDM(nn.Linear(100, 10).parameters(), period=2, bucket_mb=0.0012, timeout=60)  # 4 buckets
    optimizer.step()
    if rank:
        optimizer.step()
        return {}
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        optimizer.step()
    return {event.key: event.count for event in taken.key_averages() if event.key.startswith("decent_opt::")}


def test_a_profile_of_a_round_shows_its_phases() -> None:
    assert run_ranks(profiled, 2, "loopback")[0] == dict.fromkeys(PHASES, 4)


def test_without_a_profiler_a_phase_costs_next_to_nothing() -> None:
    def empty() -> None:
        with phase("encode"):
            pass

    assert not torch.autograd._profiler_enabled()
    # 0.4 us where nothing else runs; `record_function` would be 10 us there.
    assert min(timeit.repeat(empty, number=1000, repeat=20)) / 1000 < 5e-6
