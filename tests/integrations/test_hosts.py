"""Two hosts of two ranks: gradients are averaged inside a host, parameters are mixed across."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_opt import ConfigError
from decent_opt.gossip.message import HEADER_BYTES
from decent_opt.integrations.ddp import decentralize, host_groups
from decent_opt.simulation import SGDM, PeriodicTwin
from decent_opt.testing import RankPool, seeded
from decent_opt.topology import make_topology

STEPS, LR = 12, 0.1


def net() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(batch).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(rank: int, options: dict[str, Any]) -> tuple[Tensor, int, bool]:
    hosts = host_groups(2)
    network = net()
    model = DistributedDataParallel(network, process_group=hosts.inside)
    optimizer = decentralize(
        model,
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        hosts=hosts,
        topology="complete",
        bucket_mb=2e-4,
        timeout=60,
        **options,
    )
    path = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        path.append(flat(network).clone())
    sent = optimizer.monitor.totals["gossip"].bytes_sent
    optimizer.consensus_()
    equal = optimizer.consensus_distance() == 0
    optimizer.close()
    return torch.stack(path), sent, equal


@pytest.mark.parametrize(
    "options",
    [{"period": 3}, {"period": 3, "outer_momentum": 0.5}, {"period": 2, "warmup_steps": 4}, {"period": 1}],
    ids=str,
)
def test_two_by_two_equals_the_twin_of_two_hosts(ranks: RankPool, options: dict[str, Any]) -> None:
    results = ranks.run(train, 4, (options,))
    for host in (0, 2):  # inside a host parameters never differ, not by a bit
        assert torch.equal(results[host][0], results[host + 1][0])

    network = net()
    sizes = [p.numel() for p in network.parameters()]

    def gradient(host: int, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            for parameter, value in zip(network.parameters(), x.split(sizes), strict=True):
                parameter.copy_(value.view_as(parameter))
        network.zero_grad()
        for rank in (2 * host, 2 * host + 1):
            (loss_of(network, rank, step) / 2).backward()
        return torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None])

    twin = PeriodicTwin(flat(net()), gradient, SGDM(LR, momentum=0.9), make_topology("complete", 2), **options)
    for step in range(STEPS):
        twin.step()
        for host in (0, 1):
            error = (results[2 * host][0][step] - twin.X[host]).norm() / twin.X[host].norm()
            assert error <= 1e-6
    assert all(equal for _, _, equal in results)


def test_a_host_sends_each_parameter_once_per_neighbour(ranks: RankPool) -> None:
    results = ranks.run(train, 4, ({"period": 3},))
    model, rounds, headers = 4 * sum(p.numel() for p in net().parameters()), STEPS // 3, HEADER_BYTES
    for host in (0, 2):
        sent = results[host][1] + results[host + 1][1]
        assert rounds * model < sent <= rounds * (model + 20 * headers)


def bad_uses(rank: int) -> list[str]:
    hosts = host_groups(2)
    texts = []
    for attempt in (
        lambda: host_groups(3),
        lambda: decentralize(net(), torch.optim.SGD(net().parameters(), lr=0.1), hosts=hosts),
        lambda: decentralize(
            DistributedDataParallel(net(), process_group=hosts.inside),
            torch.optim.SGD(net().parameters(), lr=0.1),
            hosts=hosts,
            overlap_steps=2,
        ),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        texts.append(str(error.value))
    return texts


def test_refusals(ranks: RankPool) -> None:
    divisor, model, overlap = ranks.run(bad_uses, 4)[3]
    assert divisor == "host_size: allowed is a divisor of the 4 ranks, got 3"
    assert model.startswith("hosts: the model has to be DistributedDataParallel")
    assert overlap == "overlap_steps: allowed is 0 with hosts, got 2"
