"""m/n blocks for DistributedDataParallel: every worker sends a share tau of its gradient's blocks, of its own choice.

    ddp_model.register_comm_hook(BlockSparseState(), block_sparse_hook)

Of worker i, for each bucket of gradients, with blocks U_i drawn anew at every step (k of m, k / m = tau):

    q_i = (v_i)_{U_i} is sent        S = sum_i q_i is what everybody gets        gradient = f(S)

where v_i and f are the estimator's (`decent_opt.sparsification.estimators`); by default v_i = g_i, gradient =
(m / k n) S, whose mean is the mean gradient: ISGD of "99% of Distributed Optimization is a Waste of Time" (arXiv
1901.09437), for any optimizer. Which blocks others chose is recomputed from the seed, so no index is sent.

Aggregation `gather`: the chosen values of all workers go to all, (n - 1) tau d per worker and step. `server`, the
paper's: they go to rank 0, tau d, which sends S back, d.
"""

# No `from __future__ import annotations` here: register_comm_hook compares the hook's annotations with the classes.
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decent_opt.communication import ring_all_reduce_bytes
from decent_opt.compression.base import wide
from decent_opt.errors import ConfigError, Disagreement
from decent_opt.integrations.block_routes import (
    HEADER,
    OUT_OF_STEP,
    Exchange,
    Route,
    ThroughAll,
    ThroughServer,
    use_stream,
)
from decent_opt.integrations.bucket_layout import Bucket, BucketLayout
from decent_opt.integrations.hook_state import GradientHookState, all_reduced, check_bucket, flat
from decent_opt.monitoring import RoundRecord
from decent_opt.monitoring.ranges import phase
from decent_opt.sparsification import Aggregation, BlockSampler, EstimatorName, Masks, Piece, make_estimator
from decent_opt.sparsification.sampler import check_block, check_masks, check_tau

__all__ = ["BlockSparseState", "block_sparse_hook"]

Partition = Callable[[Sequence[Tensor]], Sequence[int]]


class BlockSparseState(GradientHookState):
    """State of `block_sparse_hook`. Construction is collective: ranks that differ in it raise, all of them.

    Args:
        tau: share of the blocks that a worker sends, in (0, 1]; None: 1 / n.
        estimator: "unbiased", "error_feedback" (one float32 copy of the parameters) or "control_variate" (two).
        masks: "independent", "permutation" (disjoint) or "shared"; see `BlockSampler`.
        block: elements of a block, which shrinks until a bucket has 4 / tau of them; "tensor": a block per parameter;
            or a function from the parameters of a bucket to the lengths of its blocks, in order.
        aggregation: "gather" or "server"; see the module.
        value_dtype: torch.bfloat16 to send chosen values in 16 bits; None: in the gradient's dtype, float32 at least.
        model: the DDP model that the hook is registered on. It names the memories in `state_dict`, which needs it
            if the estimator keeps any, and says which process group to use.
        seed: of the draws.
        warmup_steps: first backward passes, in which whole gradients are all-reduced. Adaptive optimizers need some.
        sinks: called with a record per backward pass, of the kind "gradient".
        process_group: the DDP model's, where `model` is not given and it is not the default one.

    Attributes:
        step: backward passes that were exchanged.
        monitor: the records.

    Raises:
        ConfigError, Disagreement: on every rank.
    """

    hook = "block_sparse_hook"

    def __init__(
        self,
        tau: float | None = None,
        estimator: EstimatorName = "unbiased",
        *,
        masks: Masks = "independent",
        block: int | Literal["tensor"] | Partition = 1024,
        aggregation: Aggregation = "gather",
        value_dtype: torch.dtype | None = None,
        model: nn.Module | None = None,
        seed: int = 0,
        warmup_steps: int = 0,
        sinks: Iterable[Callable[[RoundRecord], object]] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, sinks, process_group)
        self.layout = BucketLayout()
        self.masks, self.block, self.aggregation = masks, block, aggregation
        self.value_dtype, self.seed, self.warmup_steps = value_dtype, seed, warmup_steps
        with self._agreed() as claims:
            self.tau = 1.0 / self.size if tau is None else tau
            self.estimator = make_estimator(estimator)
            self.estimator_name, self.memories = estimator, self.estimator.memories
            self._check()
            claims.update({field: repr(value) for field, value in self.identity().items()})
        self._connect()

    def _check(self) -> None:
        check_tau(self.tau)
        check_masks(self.masks)
        if self.aggregation not in get_args(Aggregation):
            allowed = ", ".join(get_args(Aggregation))
            raise ConfigError(f"aggregation: allowed are {allowed}, got {self.aggregation!r}")
        if self.value_dtype not in (None, torch.bfloat16):
            raise ConfigError(f"value_dtype: allowed are None and torch.bfloat16, got {self.value_dtype!r}")
        steps = self.warmup_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"warmup_steps: must be a whole number from 0, got {steps!r}")
        if isinstance(self.block, str) and self.block != "tensor":
            raise ConfigError(f'block: a name can only be "tensor", got {self.block!r}')
        if isinstance(self.block, int):
            check_block(self.block)

    def _connect(self) -> None:
        through = ThroughServer if self.aggregation == "server" and self.size > 1 else ThroughAll
        self._route: Route = through(self.group)

    _OF_THE_PROCESS = (*GradientHookState._OF_THE_PROCESS, "_route")

    def bind(self, model: nn.Module, sinks: Iterable[Callable[[RoundRecord], object]] = ()) -> None:
        """Connect a copy, made by pickling or deepcopy, to the DDP model that its hook is registered on; collective."""
        super().bind(model, sinks)
        self._connect()

    def state_dict(self) -> dict[str, Any]:
        """See `GradientHookState`; and DDP's buckets, over which blocks are drawn."""
        return {**super().state_dict(), "buckets": [list(numbers) for numbers in self.layout.now]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `GradientHookState`."""
        super().load_state_dict(state_dict)
        self.layout = BucketLayout(saved=[list(numbers) for numbers in state_dict["buckets"]] or None)

    def describe(self) -> str:
        """What is sent."""
        return f"tau = {self.tau:g} with aggregation {self.aggregation!r}"

    def identity(self) -> dict[str, Any]:
        """What a saved state has to have in common with this one."""
        block = self.block if isinstance(self.block, (int, str)) else getattr(self.block, "__qualname__", "a function")
        own = {"tau": self.tau, "estimator": self.estimator_name, "masks": self.masks, "block": block}
        dtype = None if self.value_dtype is None else str(self.value_dtype)
        return {
            **own,
            "aggregation": self.aggregation,
            "value_dtype": dtype,
            "seed": self.seed,
            "warmup_steps": self.warmup_steps,
        }

    def sampler(self, parameters: Sequence[Tensor]) -> BlockSampler:
        """The draws of a bucket of these parameters; told apart from others by the first one, not by the bucket."""
        numel = sum(parameter.numel() for parameter in parameters)
        if isinstance(self.block, int):
            block: int | Sequence[int] = self.block
        elif callable(self.block):
            block = list(self.block(parameters))
        else:
            block = [parameter.numel() for parameter in parameters]
        tensor = self.index_of(parameters[0])
        return BlockSampler.over(numel, self.tau, block=block, masks=self.masks, seed=self.seed, tensor=tensor)


def block_sparse_hook(state: BlockSparseState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: a gradient made of m/n blocks of each worker's."""
    if state.size == 1:
        nothing: torch.futures.Future[Tensor] = torch.futures.Future()
        nothing.set_result(bucket.buffer())
        return nothing
    state.check_bound()
    if bucket.index() == 0:
        state.step += 1
    if state.step <= state.warmup_steps:
        moved = ring_all_reduce_bytes(bucket.buffer().nbytes, state.size)
        state.account(bucket, moved, moved, 0.0)
        return all_reduced(bucket.buffer(), state.group, state.size)
    numbers = [state.index_of(parameter) for parameter in bucket.parameters()]
    return state.layout.start(bucket, numbers, lambda held: _start(state, held))


def _start(state: BlockSparseState, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Encode a bucket and send it on its way."""
    began = time.perf_counter()
    exchange = _Exchange(state, bucket)
    with phase("encode"), torch.no_grad():
        message = exchange.encode()
    future, sent, received = state._route.start(exchange, message)
    state.account(bucket, sent, received, time.perf_counter() - began)
    return future


class _Exchange(Exchange):
    """One bucket on its way."""

    def __init__(self, state: BlockSparseState, bucket: Bucket) -> None:
        self.state, self.step, self.buffer = state, state.step, bucket.buffer()
        self.rank, self.size = state.rank, state.size
        check_bucket(state.hook, self.buffer)
        parameters = bucket.parameters()
        self.sampler = state.sampler(parameters)
        # v stands in the bucket itself, unless that is too narrow to compute in.
        self.v = self.buffer.to(wide(self.buffer.dtype))
        self.sizes = [parameter.numel() for parameter in parameters]
        memories = [{name: flat(m) for name, m in state.memory_of(p).items()} for p in parameters]
        self.pieces = [Piece(v, memory) for v, memory in zip(self.v.split(self.sizes), memories, strict=True)]
        self._draws: dict[int, Tensor] = {}

    def encode(self) -> Tensor:
        """The message: the step, then (v)_U."""
        state, blocks = self.state, self.sampler.blocks
        state.estimator.prepare(self.pieces)
        dtype = state.value_dtype or self.v.dtype
        room = self.sampler.room(self.step, state.size)  # of the worker that needs most
        message = self.v.new_zeros(HEADER + -(-room * dtype.itemsize // 8) * 8, dtype=torch.uint8)
        message[:HEADER].view(torch.int64).fill_(self.step)
        self.sent = self._values(message, state.rank)
        blocks.pack(self.v, self._chosen(state.rank), self.sent)
        if state.memories:
            # A memory must not learn what is not finite, on any worker: then all that this one sends says so.
            least, most = torch.aminmax(self.v)
            self.sent.add_(least * 0 + most * 0)
        return message

    def sum(self, messages: Tensor) -> Tensor:
        """S, (numel,), of the messages of all workers, (n, length)."""
        use_stream(messages)
        self.check_steps(messages[:, :HEADER].view(torch.int64))
        total = torch.zeros_like(self.v)
        for rank, message in enumerate(messages):
            self.sampler.blocks.add_(total, self._chosen(rank), self._values(message, rank))
        return total

    def gradient(self, total: Tensor) -> Tensor:
        """The estimator's gradient, in the bucket; the memories have moved."""
        state = self.state
        use_stream(self.v)
        if state.memories:
            q = torch.zeros_like(self.v)
            self.sampler.blocks.add_(q, self._chosen(state.rank), self.sent)
            for piece, part in zip(self.pieces, q.split(self.sizes), strict=True):
                piece.q = part
        for piece, part in zip(self.pieces, total.split(self.sizes), strict=True):
            piece.total = part
        bad = total.isfinite().all().logical_not() if state.memories else total.new_zeros((), dtype=torch.bool)
        state.estimator.finish(self.pieces, self.sampler.scale, state.size, bad)
        if state.memories:
            total.add_(torch.where(bad, torch.nan, 0.0))  # the whole bucket, so that a scaler skips the step
        return self.buffer.copy_(total)

    def check_steps(self, steps: Tensor) -> None:
        """All messages belong to this step; on an accelerator the host does not look."""
        if steps.device.type == "cpu" and (wrong := {s for s in steps.view(-1).tolist() if s != self.step}):
            others = "the server found others at other steps" if OUT_OF_STEP in wrong else f"others at {sorted(wrong)}"
            raise Disagreement(
                f"step: rank {self.state.rank} is at {self.step}, {others}; "
                "every rank has to load the state that it saved, of the same step"
            )

    def _chosen(self, rank: int) -> Tensor:
        if rank not in self._draws:
            self._draws[rank] = self.sampler.chosen(self.step, rank)
        return self._draws[rank]

    def _values(self, message: Tensor, rank: int) -> Tensor:
        """The view of a message's values; behind them it may be filled up."""
        values = message[HEADER:].view(self.state.value_dtype or self.v.dtype)
        return values[: self.sampler.blocks.room(self._chosen(rank))]
