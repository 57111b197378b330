"""Ranks by host: gradients are averaged inside a host at every step, parameters are mixed across hosts.

hosts = host_groups(8)                                        # torchrun numbers ranks host by host
model = DistributedDataParallel(model, process_group=hosts.inside)
optimizer = decentralize(model, optimizer, hosts=hosts, topology="ring")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from decent_opt.errors import ConfigError


@dataclass(frozen=True)
class Hosts:
    """This rank's two process groups.

    Attributes:
        inside: the ranks of its host.
        across: the ranks that have the same place on every host, one per host.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup


def host_groups(host_size: int) -> Hosts:
    """Make the groups for hosts of `host_size` consecutive ranks; collective over the world.

    Raises:
        ConfigError: the world is no whole number of such hosts.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if host_size < 1 or world % host_size:
        raise ConfigError(f"host_size: allowed is a divisor of the {world} ranks, got {host_size}")
    # Every rank makes every group, in the same order, as torch demands; it keeps the two that it is in.
    inside = [dist.new_group(list(range(h, h + host_size))) for h in range(0, world, host_size)]
    across = [dist.new_group(list(range(place, world, host_size))) for place in range(host_size)]
    return Hosts(inside[rank // host_size], across[rank % host_size])
