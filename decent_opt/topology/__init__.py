"""Topologies: who mixes with whom, with which weights, in which round. Pure data and linear algebra.

    x_k <- sum_j W[k, j] x_j        row k of W = the receiver k

`make_topology` turns a name, a matrix, a graph or a user's own object into a `Topology`; the rest of the package reads
W, peers and period from there. Nothing here knows of processes, devices or messages.
"""

from __future__ import annotations

from decent_opt.topology.base import CyclicTopology, Peers, Topology
from decent_opt.topology.factory import NAMES, TopologySpec, make_topology
from decent_opt.topology.placement import permute
from decent_opt.topology.spectrum import beta, consensus_factor, rounds_to_reduce, spectral_gap
from decent_opt.topology.weights import fastest_mixing, metropolis_hastings, uniform_weights

__all__ = [
    "NAMES",
    "CyclicTopology",
    "Peers",
    "Topology",
    "TopologySpec",
    "beta",
    "consensus_factor",
    "fastest_mixing",
    "make_topology",
    "metropolis_hastings",
    "permute",
    "rounds_to_reduce",
    "spectral_gap",
    "uniform_weights",
]
