"""One round of mixing, in two phases: dense (PD-SGDM), overlapped, compressed (CPD-SGDM); and exact averages."""

from decent_opt.gossip.buckets import Bucket, make_buckets
from decent_opt.gossip.compressed import CompressedGossip, Mixable, restart
from decent_opt.gossip.exact import average_, broadcast_
from decent_opt.gossip.exchange import Mixing
from decent_opt.gossip.finite import not_finite
from decent_opt.gossip.hosts import HostGossip
from decent_opt.gossip.overlapped import OverlappedGossip, apply_corrections
from decent_opt.gossip.periodic import PeriodicGossip

__all__ = [
    "Bucket",
    "CompressedGossip",
    "HostGossip",
    "Mixable",
    "Mixing",
    "OverlappedGossip",
    "PeriodicGossip",
    "apply_corrections",
    "average_",
    "broadcast_",
    "make_buckets",
    "not_finite",
    "restart",
]
