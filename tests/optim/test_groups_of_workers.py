"""Workers that mix in groups of their own: the ranks of a process group, not of the world."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
from torch import nn

from decent_opt import PDSGDM, ConfigError
from decent_opt.testing import RankPool


def in_pairs(rank: int) -> tuple[torch.Tensor, float, str]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    weight = nn.Parameter(torch.full((3,), float(rank)))
    optimizer = PDSGDM([weight], lr=0.0, period=1, sync_init=False, process_group=pairs[rank // 2], timeout=60)
    weight.grad = torch.zeros(3)
    optimizer.step()
    copy = pickle.loads(pickle.dumps(optimizer))
    try:
        copy.step()
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    return weight.detach(), optimizer.consensus_distance(), refusal


def test_pairs(ranks: RankPool) -> None:
    results = ranks.run(in_pairs, 4)
    assert [weight.tolist() for weight, _, _ in results] == [[0.5] * 3, [0.5] * 3, [2.5] * 3, [2.5] * 3]
    assert all(distance == 0 for _, distance, _ in results)
    assert all(refusal.startswith("process_group: made for one") for _, _, refusal in results)
