"""Workers die by SIGKILL, and the others go on: rank 0 too, which hosts torch's store, and two one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peer_loss import TIMEOUT, told, train
from decent_opt import ConfigError, Decentralized
from decent_opt.testing import RankFailed, RankPool, run_ranks


def survive(folder: Path, n: int, deaths: dict[int, int], options: dict[str, Any]) -> list[dict[str, Any]]:
    folder.mkdir()
    options = {"topology": "ring", **options}
    if deaths:
        options["on_peer_loss"] = "continue"
        with pytest.raises(RankFailed) as error:
            run_ranks(train, n, args=(str(folder), deaths, options), timeout=60)
        assert sorted(error.value.reports) == sorted(deaths), error.value
    else:
        run_ranks(train, n, "loopback", (str(folder), deaths, options), timeout=60)
    left = told(str(folder), range(n))
    assert len(left) == n - len(deaths)
    for one in left:
        assert one["finite"] and one["size"] == n - len(deaths)
        assert one["longest"] < 2 * TIMEOUT
        assert one["loss"] == left[0]["loss"]  # after consensus_
    return left


CPD: dict[str, Any] = {"algorithm": "cpd"}
OVERLAP: dict[str, Any] = {"overlap_steps": 1, "outer_momentum": 0.3}


@pytest.mark.parametrize(
    ("deaths", "options"),
    [
        ({0: 21}, {}),
        ({2: 21}, CPD),
        ({0: 20}, {**CPD, "order": "fresh"}),
        ({1: 21}, OVERLAP),
        ({1: 5}, {"warmup_steps": 12}),
        ({0: -21}, {}),  # stopped, not dead
    ],
    ids=["rank 0", "cpd", "rank 0, cpd fresh", "overlap", "warm-up", "stopped"],
)
def test_the_others_go_on(deaths: dict[int, int], options: dict[str, Any], tmp_path: Path) -> None:
    undisturbed = survive(tmp_path / "fewer", 3, {}, options)
    left = survive(tmp_path / "one dies", 4, deaths, options)
    if options:  # copies and outer momentum begin anew, which costs some steps: it goes on falling from 3.4
        assert left[0]["loss"] < 0.3
    else:
        assert left[0]["loss"] < 1.02 * undisturbed[0]["loss"]
    assert all("average" in one["kinds"] for one in left)


def test_two_die_one_after_the_other(tmp_path: Path) -> None:
    undisturbed = survive(tmp_path / "fewer", 3, {}, {})
    left = survive(tmp_path / "two die", 5, {0: 11, 3: 31}, {"topology": "one-peer-exponential"})
    assert left[0]["loss"] < 1.02 * undisturbed[0]["loss"]


def test_a_minority_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as error:
        run_ranks(train, 2, args=(str(tmp_path), {0: 11}, {"on_peer_loss": "continue"}), timeout=60)
    assert "rank 1: only 1 of 2 are left here; the others may go on" in error.value.reports[1]


def refused(rank: int, options: dict[str, Any]) -> str:
    try:
        Decentralized(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), on_peer_loss="continue", **options)
    except ConfigError as error:
        return str(error)
    return ""


def test_where_it_cannot_work_it_is_refused(ranks: RankPool) -> None:
    assert all("works on processes without hosts" in text for text in run_ranks(refused, 2, "loopback", ({},)))
    weights = [[0.5, 0.5], [0.5, 0.5]]
    assert all("works with a topology by name" in text for text in ranks.run(refused, 2, ({"topology": weights},)))
