"""Compressed gradients for DistributedDataParallel, with error feedback: a communication hook.

    state = CompressedState("sign", model=ddp_model)
    ddp_model.register_comm_hook(state, compressed_hook)

Of worker i, for each parameter, with gradient g_i, residual e_i (zero at first) and operator Q:

    p_i = g_i + e_i        q_i = Q(p_i)        e_i <- p_i - q_i        gradient <- (1/n) sum_j q_j

An unbiased Q is scaled by 1 / (1 + omega) first, so that it contracts. With `error_feedback=False` it is
q_i = Q(g_i), unscaled. Sources: Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019 (EF-SGD). Unlike there, the
residual is one of gradients, not of updates: what is held back is applied with a later learning rate.

The messages of all workers go to all: an all-gather, n - 1 messages each. It sends less than DDP's all-reduce only
while n times the bits per element stays below about 64. To send less at any n, mix parameters (`decentralize`).
"""

# No `from __future__ import annotations` here: register_comm_hook compares the hook's annotations with the classes.
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decent_opt.compression import Compressor, CompressorSpec, Key, Layout, make_compressor
from decent_opt.compression.base import wide
from decent_opt.errors import Disagreement
from decent_opt.integrations.hook_state import GradientHookState, all_gather, check_bucket, flat
from decent_opt.monitoring import RoundRecord
from decent_opt.monitoring.ranges import phase

__all__ = ["CompressedState", "compressed_hook"]

logger = logging.getLogger(__name__)
_HEADER = 8  # bytes: a float32, 0 or NaN, that says whether the sender's values are finite; the step as int32
_TYPICAL = Layout(((1 << 16, 1),))


@dataclass(frozen=True)
class _Slot:
    """What is fixed about one parameter. Nothing depends on buckets: DDP makes new ones after the first step."""

    index: int  # the same on all ranks
    layout: Layout
    nbytes: int  # of its part of a message
    room: int  # the same, rounded up to a multiple of 8
    scale: float  # of Q
    residual: Tensor | None  # shaped like the parameter, in the same order in memory


class CompressedState(GradientHookState):
    """State of `compressed_hook`. Construction is collective: ranks that differ in it raise, all of them.

    Args:
        compressor: a name with options, or a `Compressor`.
        error_feedback: add what a message lacked to the next one. Costs one float32 copy of the parameters.
        model: the DDP model that the hook is registered on. It names the residuals in `state_dict`, which needs it,
            and says which process group to use.
        seed: of random compressors.
        sinks: called with a record per backward pass, of the kind "gradient".
        process_group: the DDP model's, where `model` is not given and it is not the default one.

    Attributes:
        step: backward passes that were exchanged.
        monitor: the records.

    Raises:
        ConfigError, Disagreement: on every rank.
    """

    hook = "compressed_hook"

    def __init__(
        self,
        compressor: CompressorSpec,
        *,
        error_feedback: bool = True,
        model: nn.Module | None = None,
        seed: int = 0,
        sinks: Iterable[Callable[[RoundRecord], object]] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, sinks, process_group)
        self.error_feedback, self.seed = error_feedback, seed
        self.memories = ("residuals",) if error_feedback else ()
        with self._agreed() as claims:
            self.compressor: Compressor = make_compressor(compressor)
            claims.update({field: repr(value) for field, value in self.identity().items()})
        delta = self.compressor.delta(_TYPICAL)
        if not error_feedback and delta is not None and delta < 0.5 and self.rank == 0:
            logger.warning(
                "error_feedback: got False with %r, so what it leaves out of each gradient is lost for good and the "
                "training may stall away from the optimum; use error_feedback=True or an unbiased compressor",
                self.compressor,
            )

    def describe(self) -> str:
        """The compressor, as text."""
        return repr(self.compressor)

    def identity(self) -> dict[str, Any]:
        """What a saved state has to have in common with this one."""
        return {"compressor": repr(self.compressor), "error_feedback": self.error_feedback, "seed": self.seed}

    def _slot(self, parameter: Tensor) -> _Slot:
        if parameter not in self._slots:
            index, layout = self.index_of(parameter), Layout.of(parameter.shape)
            nbytes = self.compressor.nbytes(layout, wide(parameter.dtype))
            scale = self.compressor.damping(layout) if self.error_feedback else 1.0
            residual = self.memory_of(parameter).get("residuals")
            self._slots[parameter] = _Slot(index, layout, nbytes, -(-nbytes // 8) * 8, scale, residual)
        return self._slots[parameter]

    _OF_THE_PROCESS = (*GradientHookState._OF_THE_PROCESS, "_slots")

    def _adopt(self, model: nn.Module | None, process_group: dist.ProcessGroup | None) -> None:
        super()._adopt(model, process_group)
        self._slots: dict[Tensor, _Slot] = {}


def compressed_hook(state: CompressedState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: the mean of the workers' compressed gradients."""
    if state.size == 1:
        nothing: torch.futures.Future[Tensor] = torch.futures.Future()
        nothing.set_result(bucket.buffer())
        return nothing
    state.check_bound()
    if bucket.index() == 0:
        state.step += 1
    began = time.perf_counter()
    exchange = _Exchange(state, bucket)
    with phase("encode"):
        message = exchange.encode()
    gathered = message.new_empty(state.size * message.numel())
    total = message.nbytes * (state.size - 1)
    state.account(bucket, total, total, time.perf_counter() - began)
    work = all_gather(gathered, message, group=state.group, async_op=True)

    def finish(future: torch.futures.Future[Any]) -> Tensor:
        future.wait()  # it is done; this raises what went wrong. Its value is laid out differently by each backend.
        with phase("decode"), torch.no_grad():
            return exchange.decode(gathered.view(state.size, -1))

    # `finish` waits for no other collective: gloo has two threads for such callbacks, and they would wait for ever.
    return work.get_future().then(finish)


class _Exchange:
    """One bucket on its way: one part of the message for each parameter, so the result does not depend on buckets."""

    def __init__(self, state: CompressedState, bucket: dist.GradBucket) -> None:
        self.state, self.step, self.buffer = state, state.step, bucket.buffer()
        check_bucket(state.hook, self.buffer)
        self.slots = [state._slot(parameter) for parameter in bucket.parameters()]
        # p stands in the bucket itself, unless that is too narrow to compute in.
        self.p = self.buffer.to(wide(self.buffer.dtype))
        self.vectors = self.p.split([slot.layout.numel for slot in self.slots])
        self.residuals = [flat(slot.residual) for slot in self.slots if slot.residual is not None]

    def encode(self) -> Tensor:
        """p <- g + e, and the message with Q(p)."""
        state = self.state
        if self.residuals:
            torch._foreach_add_(list(self.vectors), self.residuals)
        message = self.p.new_zeros(_HEADER + sum(slot.room for slot in self.slots), dtype=torch.uint8)
        least, most = torch.aminmax(self.p)
        message[:4].view(torch.float32).copy_(least * 0 + most * 0)  # NaN where anything is infinite or NaN
        message[4:8].view(torch.int32).fill_(self.step)
        self.p.nan_to_num_(0.0, 0.0, 0.0)
        for slot, vector, part in self._parts(message):
            state.compressor.encode(vector, slot.layout, part, self._key(slot, state.rank))
        return message

    def decode(self, messages: Tensor) -> Tensor:
        """e <- p - q, and the mean of all q in the bucket; if any worker's p was not finite, no e and a NaN mean."""
        state = self.state
        if messages.is_cuda:  # This is another stream than the one on which these two were allocated.
            for tensor in (self.p, messages):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        flag = self._flag(messages)
        bad = flag.isnan()
        if self.residuals:
            self._add(messages[state.rank], -1.0, state.rank)
            for residual, vector in zip(self.residuals, self.vectors, strict=True):
                torch.where(bad, residual, vector, out=residual)
        self.p.copy_(flag)
        for rank, message in enumerate(messages):
            self._add(message, 1.0 / state.size, rank)
        return self.p if self.p is self.buffer else self.buffer.copy_(self.p)

    def _flag(self, messages: Tensor) -> Tensor:
        """0, or NaN where a worker's values are not finite or belong to another step; the host does not wait."""
        steps = messages.view(torch.int32)[:, 1]
        if messages.device.type == "cpu" and (wrong := {s for s in steps.tolist() if s != self.step}):
            raise Disagreement(
                f"step: rank {self.state.rank} is at {self.step}, others at {sorted(wrong)}; "
                "every rank has to load the state that it saved, of the same step"
            )
        flag = messages.view(torch.float32)[:, 0].sum()
        return torch.where((steps == self.step).all(), flag, torch.nan)

    def _add(self, message: Tensor, weight: float, rank: int) -> None:
        """p <- p + weight q of the worker that sent the message."""
        decode_add_ = self.state.compressor.decode_add_
        for slot, vector, part in self._parts(message):
            decode_add_(vector, slot.layout, part, weight * slot.scale, self._key(slot, rank))

    def _parts(self, message: Tensor) -> Iterator[tuple[_Slot, Tensor, Tensor]]:
        parts = message[_HEADER:].split([slot.room for slot in self.slots])
        for slot, vector, part in zip(self.slots, self.vectors, parts, strict=True):
            yield slot, vector, part[: slot.nbytes]

    def _key(self, slot: _Slot, rank: int) -> Key:
        return Key(self.state.seed, self.step, rank, slot.index)
