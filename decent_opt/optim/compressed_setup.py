"""What CPD-SGDM needs before its first round: a W that public copies can live with, a compressor, gamma, one start."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from decent_opt.compression import Compressor, Layout, make_compressor
from decent_opt.config import DecentConfig
from decent_opt.errors import ConfigError
from decent_opt.theory import choco_gamma
from decent_opt.topology import Topology
from decent_opt.topology.validation import is_symmetric


def check_topology(topology: Topology) -> None:
    """Raise `ConfigError` unless W is symmetric and the same in all rounds."""
    directed = topology.period == 1 and not is_symmetric(topology.matrix(0))
    if topology.period > 1 or directed:
        why = "is directed" if directed else f"changes over {topology.period} rounds"
        raise ConfigError(
            'topology: algorithm="cpd" needs one symmetric W for all rounds, because public copies are kept of it, '
            f'got {topology.name}, which {why}; take ring, torus, hypercube or complete, or algorithm="pd"'
        )


def compressor_and_gamma(
    config: DecentConfig, topology: Topology, parameters: dict[str, Tensor]
) -> tuple[Compressor, float]:
    """What the config asks for, and the consensus step size to begin with.

    Raises:
        ConfigError: there is no such compressor.
    """
    compressor = make_compressor(config.compressor)
    if config.gamma == "theory":
        # Of the largest parameter: small ones are packed together and fare better.
        largest = max(parameters.values(), key=torch.numel)
        return compressor, choco_gamma(topology, compressor.typical_delta(Layout.of(largest.shape)))
    if config.gamma == "auto":
        return compressor, first_gamma(compressor)
    return compressor, compressor.gamma if config.gamma is None else config.gamma


def first_gamma(compressor: Compressor) -> float:
    """Where gamma="auto" begins, and what it never falls below."""
    return compressor.gamma / 4


def digests(parameters: dict[str, Tensor]) -> dict[str, str]:
    """A line per parameter about its values: public copies begin at x_0, which has to be equal on all ranks."""
    return {f"sync_init=False, start of {name}": _digest(p.detach()) for name, p in parameters.items()}


def _digest(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:12]
