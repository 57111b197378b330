"""One round of mixing, in two phases: `PeriodicGossip` (dense, PD-SGDM) and exact averages."""

from decent_opt.gossip.buckets import Bucket, make_buckets
from decent_opt.gossip.exact import average_, broadcast_
from decent_opt.gossip.periodic import Mixing, PeriodicGossip

__all__ = ["Bucket", "Mixing", "PeriodicGossip", "average_", "broadcast_", "make_buckets"]
