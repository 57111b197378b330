"""Which transport a worker has: found once, at construction, from where the worker runs."""

from __future__ import annotations

import os
import threading

import torch.distributed as dist

from decent_opt.communication.distributed import DistributedTransport
from decent_opt.communication.loopback import LoopbackTransport
from decent_opt.communication.transport import Transport
from decent_opt.errors import ConfigError

_thread = threading.local()


def set_thread_transport(transport: LoopbackTransport | None) -> None:
    """Make `connect` answer with this transport in the current thread (used by `testing.run_ranks`)."""
    _thread.transport = transport


def connect(process_group: dist.ProcessGroup | None = None, timeout: object = None) -> Transport:
    """Return the transport of this worker; collective where torch.distributed is initialised.

    A timeout that is no positive number is replaced by the default of 300 s here: the validation of the options,
    which all ranks hear of, refuses it a moment later.

    In order: the loopback of the current thread; torch.distributed; a world of one rank.

    Raises:
        ConfigError: the launcher started several processes, but torch.distributed is not initialised. Going on
            would train as many unconnected models, the commonest silent mistake with launchers.
    """
    transport: LoopbackTransport | None = getattr(_thread, "transport", None)
    if transport is not None:
        return transport.of_its_own()
    if dist.is_available() and dist.is_initialized():
        valid = isinstance(timeout, (int, float)) and 0 < timeout < 1e9
        return DistributedTransport(process_group, float(timeout) if valid else 300.0)  # type: ignore[arg-type]
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE: the launcher started {launched} processes, but torch.distributed is not initialised; "
            "call torch.distributed.init_process_group() before the optimizer is made"
        )
    return LoopbackTransport()


def place(process_group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, size) of this worker in the world that `connect` would join; asks nobody."""
    transport: LoopbackTransport | None = getattr(_thread, "transport", None)
    if transport is not None:
        return transport.rank, transport.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(process_group), dist.get_world_size(process_group)
    return 0, 1
