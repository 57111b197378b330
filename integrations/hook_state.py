"""What the states of our DDP communication hooks have in common: parameters by name, memories, records, saving.

DDP rebuilds its buckets after the first step, so nothing is kept by bucket: memories belong to parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_opt.communication import DistributedTransport, agreement, ring_all_reduce_bytes
from decent_opt.compression.base import wide
from decent_opt.errors import ConfigError
from decent_opt.integrations.bucket_layout import Bucket
from decent_opt.monitoring import Monitor, RoundRecord
from decent_opt.optim.replica import describe

logger = logging.getLogger(__name__)
# The newer name of the same call; the older one warns where both exist.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class GradientHookState:
    """Base of the states. Subclasses open `_agreed` in their constructor and say what identifies them.

    Attributes:
        step: backward passes that were exchanged.
        monitor: the records, of the kind "gradient".
        rank, size: of this worker, and of the workers.
        group: the process group; None for the default one.
    """

    hook = "hook"
    """Name of the hook function, for messages."""

    warmup_steps: int = 0
    """First backward passes, in which gradients are all-reduced."""

    memories: tuple[str, ...] = ()
    """What is kept of every parameter: tensors of its shape, float32 at least, zero at first."""

    def __init__(
        self,
        model: nn.Module | None = None,
        sinks: Iterable[Callable[[RoundRecord], object]] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        name = type(self).__name__
        if not dist.is_initialized():
            raise ConfigError(f"{name}: torch.distributed is not initialised; call init_process_group() first")
        self.monitor, self.step = Monitor(sinks), 0
        self._adopt(model, process_group)

    def _adopt(self, model: nn.Module | None, process_group: dist.ProcessGroup | None) -> None:
        model = getattr(model, "_orig_mod", model)
        if isinstance(model, DistributedDataParallel):
            group, model = model.process_group, model.module
            process_group = process_group or (None if group is dist.group.WORLD else group)
        self.group: dist.ProcessGroup | None = process_group
        self._named: dict[str, Tensor] | None = None
        if model is not None:
            self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._index: dict[Tensor, int] = {p: index for index, p in enumerate((self._named or {}).values())}
        self._memory: dict[Tensor, dict[str, Tensor]] = {}
        self._sent = self._received = self._allreduce_bytes = 0
        self._seconds = 0.0

    @contextmanager
    def _agreed(self) -> Iterator[dict[str, str]]:
        """Claims that all workers have to share, compared at the end of the block; collective."""
        transport = DistributedTransport(self.group)
        self.rank, self.size = transport.rank, transport.size
        try:
            with agreement(transport) as claims:
                claims.update(describe(self._named or {}))
                yield claims
        finally:
            transport.close()

    # -- parameters --------------------------------------------------------------------------------------------

    def index_of(self, parameter: Tensor) -> int:
        """A number that all workers give this parameter: its place in the model, or the order in which DDP shows it."""
        if self._named is not None and parameter not in self._index:
            raise ConfigError(
                f"model: it has no such parameter as the hook was called with, of shape {tuple(parameter.shape)}; "
                "pass the DDP model that the hook is registered on"
            )
        return self._index.setdefault(parameter, len(self._index))

    def memory_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """This worker's memories of a parameter, by name, in the parameter's shape and order in memory."""
        if parameter not in self._memory:
            self.index_of(parameter)
            dtype = wide(parameter.dtype)
            self._memory[parameter] = {
                name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for name in self.memories
            }
        return self._memory[parameter]

    # -- records -----------------------------------------------------------------------------------------------

    def account(self, bucket: Bucket, sent: int, received: int, seconds: float) -> None:
        """Count a bucket's bytes; after the last of a backward pass, emit the record."""
        self._sent += sent
        self._received += received
        self._allreduce_bytes += ring_all_reduce_bytes(bucket.buffer().nbytes, self.size)
        self._seconds += seconds
        if not bucket.is_last():
            return
        reference = self._allreduce_bytes
        record = RoundRecord(
            "gradient", self.step, -1, {-1: self._sent}, {-1: self._received}, reference, self._seconds
        )
        if self._sent >= reference and self.rank == 0 and self.step == self.warmup_steps + 1:
            logger.warning(
                "%s sends %d bytes per backward pass where an all-reduce would send %d: %s does not pay with %d "
                "workers",
                *(self.hook, self._sent, reference, self.describe(), self.size),
            )
        self._sent = self._received = self._allreduce_bytes = 0
        self._seconds = 0.0
        self.monitor.emit(record)

    def describe(self) -> str:
        """What is sent, for messages."""
        raise NotImplementedError

    # -- saving ------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What a saved state has to have in common with this one: numbers and strings."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """This worker's memories and counters. Workers differ: save one file per rank."""
        return {**self._whole_identity(), "step": self.step, **self._by_name()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of the same rank said; every rank has to load its own.

        Raises:
            ConfigError: of another configuration, rank, number of workers or model. Nothing was changed then.
        """
        for field, value in self._whole_identity().items():
            if state_dict.get(field) != value:
                raise ConfigError(
                    f"{field}: the saved state has {state_dict.get(field)!r}, this one {value!r}; load a state of the "
                    "same configuration and rank, or load none and begin with memories of zero"
                )
        found = self._by_name()
        for kind, mine in found.items():
            saved = state_dict[kind]
            for name in [*mine, *(name for name in saved if name not in mine)]:
                there, here = (tuple(s[name].shape) if name in s else "nothing" for s in (saved, mine))
                if there != here:
                    raise ConfigError(f"{kind} of {name}: the saved state has {there}, the model {here}")
        for kind, mine in found.items():
            for name, memory in mine.items():
                memory.copy_(state_dict[kind][name])
        self.step = state_dict["step"]

    def _whole_identity(self) -> dict[str, Any]:
        return {**self.identity(), "workers": self.size, "rank": self.rank}

    def _by_name(self) -> dict[str, dict[str, Tensor]]:
        """Kind of memory -> parameter name -> tensor."""
        if not self.memories or self.size == 1:
            return {kind: {} for kind in self.memories}
        if self._named is None:
            raise ConfigError(
                f"model: {self.memories[0]} are saved by parameter name; "
                f"use {type(self).__name__}(..., model=ddp_model)"
            )
        return {kind: {name: self.memory_of(p)[kind] for name, p in self._named.items()} for kind in self.memories}

    # -- copying -----------------------------------------------------------------------------------------------

    _OF_THE_PROCESS: tuple[str, ...] = ("group", "monitor", "_named", "_index", "_memory")

    def __getstate__(self) -> dict[str, Any]:
        """Without process group, sinks and model: a copy is bound to its own by `bind`."""
        kept = {name: value for name, value in self.__dict__.items() if name not in self._OF_THE_PROCESS}
        return {**kept, "_unbound": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt(None, None)
        self.monitor = Monitor(())

    def bind(self, model: nn.Module, sinks: Iterable[Callable[[RoundRecord], object]] = ()) -> None:
        """Connect a copy, made by pickling or deepcopy, to the DDP model that its hook is registered on; collective."""
        self._adopt(model, None)
        self.monitor = Monitor(sinks)
        with self._agreed() as claims:
            claims.update({field: repr(value) for field, value in self.identity().items()})
            self.load_state_dict(self.__dict__.pop("_unbound"))

    def check_bound(self) -> None:
        """Raise a ConfigError where the hook is called with a copy that has no model yet."""
        if "_unbound" in self.__dict__:
            raise ConfigError(f"{type(self).__name__}: this is a copy; call bind(ddp_model) before it is used")


def all_reduced(buffer: Tensor, group: dist.ProcessGroup | None, size: int) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over the workers, as DDP itself makes it."""
    work = dist.all_reduce(buffer.div_(size), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def flat(tensor: Tensor) -> Tensor:
    """A flat view in the order in memory, which is also the order in a bucket."""
    return tensor.as_strided((tensor.numel(),), (1,))


def check_bucket(hook: str, buffer: Tensor) -> None:
    """Raise a ConfigError for gradients that are not dense and floating-point."""
    if buffer.layout != torch.strided or not buffer.is_floating_point():
        raise ConfigError(
            f"gradients: {hook} sends dense floating-point ones, got {buffer.layout} of {buffer.dtype}; "
            "build embeddings with sparse=False"
        )
