"""Moving bytes between ranks: the `Transport` protocol, torch.distributed, and an in-process loopback."""

from decent_opt.communication.agreement import agreement
from decent_opt.communication.connect import connect, place, set_thread_transport
from decent_opt.communication.distributed import DistributedTransport
from decent_opt.communication.hosts import Hosts, host_groups
from decent_opt.communication.loopback import LoopbackTransport, LoopbackWorld
from decent_opt.communication.roll_call import RollCall
from decent_opt.communication.survivors import SurvivorsTransport
from decent_opt.communication.transport import Pending, Traffic, Transport, ring_all_reduce_bytes

__all__ = [
    "DistributedTransport",
    "Hosts",
    "LoopbackTransport",
    "LoopbackWorld",
    "Pending",
    "RollCall",
    "SurvivorsTransport",
    "Traffic",
    "Transport",
    "agreement",
    "connect",
    "host_groups",
    "place",
    "ring_all_reduce_bytes",
    "set_thread_transport",
]
