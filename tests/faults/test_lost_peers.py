"""A dead or a stalled peer: the others raise within the timeout, naming rank and round, and no process is left."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn

from decent_opt import PDSGDM, PeerLost
from decent_opt.testing import RankFailed, RankPool, run_ranks

TIMEOUT = 3.0


def lose(rank: int, how: str) -> tuple[str, int | None, int, float]:
    model = nn.Linear(4, 2)
    optimizer = PDSGDM(model.parameters(), period=2, topology="complete", timeout=TIMEOUT)
    step = began = 0.0
    try:
        for step in range(1, 9):
            model(torch.ones(3, 4)).sum().backward()
            if step == 6 and rank == 1:
                if how == "dead":
                    os._exit(7)
                threading.Event().wait(TIMEOUT + 2)
            began = time.monotonic()
            optimizer.step()
    except PeerLost as error:
        return str(error), error.rank, error.round, time.monotonic() - began
    raise AssertionError("no error")


def test_a_stalled_peer_is_named(ranks: RankPool) -> None:
    results = ranks.run(lose, 3, ("stalled",), timeout=40)
    for rank in (0, 2):
        text, peer, round, seconds = results[rank]
        assert (peer, round) == (1, 2) and seconds < TIMEOUT + 2
        assert f"rank {rank}: rank 1 did not answer in round 2" in text


def test_a_dead_peer_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailed) as error:
        ranks.run(lose, 3, ("dead",), timeout=40)
    assert error.value.reports == {1: "died with exit code 7"}


def test_a_failure_on_a_thread_wakes_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="boom") as error:
        run_ranks(_raise_on_one, 3, "loopback", timeout=60)
    assert time.monotonic() - began < 20
    assert set(error.value.reports) == {0, 1, 2}


def _raise_on_one(rank: int) -> None:
    optimizer = PDSGDM(nn.Linear(4, 2).parameters(), period=1)
    for step in range(3):
        if step == 1 and rank == 1:
            raise ValueError("boom")
        optimizer.step()


def _wait_for_ever(rank: int) -> None:
    threading.Event().wait(1 if rank == 0 else None)


def test_a_rank_that_hangs_is_ended_and_leaves_no_process() -> None:
    with RankPool(timeout=20) as pool:
        pids = pool.run(_pid, 2)
        with pytest.raises(RankFailed, match="no answer within the time limit") as error:
            pool.run(_wait_for_ever, 2, timeout=3)
        assert set(error.value.reports) == {1}
        assert not any(map(_is_alive, pids))
        again = pool.run(_pid, 2)  # the pool goes on with new processes
    assert not any(map(_is_alive, again))


def _pid(rank: int) -> int:
    return os.getpid()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
