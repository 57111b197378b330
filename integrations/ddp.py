"""DistributedDataParallel: local gradients, and gossip of parameters in place of DDP's all-reduce at every step.

Two ways in. `decentralize` takes the DDP model and the optimizer and returns the optimizer to step:

    optimizer = decentralize(ddp_model, optimizer, period=8, topology="ring")

`gossip_hook` is the registered form, for code that can pass a hook but not replace the optimizer:

    ddp_model.register_comm_hook(GossipState(optimizer, ddp=ddp_model, period=8), gossip_hook)
"""

# No `from __future__ import annotations` here: register_comm_hook compares the hook's annotations with the classes.
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_opt.communication import DistributedTransport, Hosts, connect, host_groups, ring_all_reduce_bytes
from decent_opt.config import resolve
from decent_opt.config_sources import Source
from decent_opt.errors import ConfigError
from decent_opt.integrations.hook_state import all_reduced
from decent_opt.monitoring import Monitor, RoundRecord
from decent_opt.optim import Decentralized
from decent_opt.optim.amp import Scaling
from decent_opt.optim.decentralized import is_state_probe
from decent_opt.optim.gradients import LearnsFromAverages
from decent_opt.optim.own_state import restore_own_entries
from decent_opt.optim.rounds import Rounds

__all__ = ["GossipState", "Hosts", "decentralize", "gossip_hook", "host_groups", "silence"]

logger = logging.getLogger(__name__)
_SUSPICIOUS_BACKWARDS = 256


def decentralize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: Source = None,
    hosts: Hosts | None = None,
    **options: Any,
) -> Decentralized:
    """Train a DDP model with gossip: its gradients stay local and silent, and parameters are mixed instead.

    Args:
        model: a `DistributedDataParallel`, a `torch.compile`d one, or a plain module (DDP is not needed then). On a
            DDP model the gradient all-reduce, the map of used parameters (`find_unused_parameters`) and the
            broadcast of buffers are switched off for good; `no_sync` keeps working and changes nothing.
        optimizer: any torch optimizer on the model's parameters, or an optimizer of decent_opt, which is returned.
        hosts: gossip across hosts only. The DDP model was built on `hosts.inside`, and goes on to average gradients
            there at every step; the topology's workers are the hosts. See `communication.hosts`.
        config, options: as in `Decentralized`. `process_group` is by default the DDP model's.

    Returns:
        The optimizer to step; schedulers and GradScaler take it as they took the old one.

    Raises:
        ConfigError, Disagreement: as `Decentralized`.
    """
    inner = getattr(model, "_orig_mod", model)
    module = inner
    if hosts is not None:
        if not isinstance(inner, DistributedDataParallel) or inner.process_group is not hosts.inside:
            raise ConfigError(
                "hosts: the model has to be DistributedDataParallel(model, process_group=hosts.inside), which averages "
                f"the gradients inside a host; got {type(inner).__name__}"
            )
        module, options["process_group"] = inner.module, hosts
    elif isinstance(inner, DistributedDataParallel):
        module = inner.module
        if inner.process_group is not dist.group.WORLD:
            options.setdefault("process_group", inner.process_group)
        silence(inner)
    if isinstance(optimizer, Decentralized):
        if config is not None or options.keys() - {"process_group"}:
            given = sorted([*options, *(["config"] if config is not None else [])])
            raise ConfigError(f"options: {given} belong to the optimizer, which is decentralised already")
        return optimizer
    return Decentralized(optimizer, model=module, config=config, **options)


def silence(ddp: DistributedDataParallel) -> None:
    """Make a DDP model send nothing by itself, for good: what a `no_sync` block around everything would do."""
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False
    ddp.broadcast_buffers = False
    if ddp.static_graph:
        # A static graph queues one delayed all-reduce in its first backward pass, without asking the switches above,
        # and fails on the reducer that they kept from preparing it. Say that it is queued already.
        ddp._static_graph_delay_allreduce_enqueued = True


class GossipState:
    """State of `gossip_hook`: runs rounds from the optimizer's own step hooks, and leaves the optimizer as it is.

    The same rules as in `Decentralized` hold, with these limits, because a hook cannot see the DDP model:
    `find_unused_parameters=True` makes DDP all-reduce a map at every step and `broadcast_buffers=True` makes every
    forward pass wait for rank 0. Pass `ddp=` to have the first refused and the second switched off.
    Copies of the optimizer (deepcopy, pickle) carry no step hooks, so they run no rounds; make a new state for them.

    Args:
        optimizer: the optimizer that the training loop steps.
        ddp: the model that the hook is registered on.
        config, sinks, process_group, options: as in `Decentralized`.

    Attributes:
        rounds: `consensus_()`, `averaged()`, `consensus_distance()`.
        monitor: the records.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        ddp: DistributedDataParallel | None = None,
        config: Source = None,
        sinks: Iterable[Callable[[RoundRecord], object]] = (),
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if isinstance(optimizer, Decentralized):
            raise ConfigError("optimizer: it is decentralised already; register no gossip_hook, or pass its `.base`")
        if isinstance(optimizer, LearnsFromAverages):
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} has to see gradients before and after they are averaged, "
                "which a hook cannot show it; use LocalAdamW with decentralize()"
            )
        if ddp is not None:
            if ddp.find_unused_parameters and not ddp.static_graph:
                raise ConfigError(
                    "find_unused_parameters: got True, with which DDP all-reduces at every step under any hook; "
                    "build DDP with find_unused_parameters=False, or use decentralize()"
                )
            ddp.broadcast_buffers = False
        self.optimizer, self.monitor = optimizer, Monitor(sinks)
        module = None if ddp is None else ddp.module
        buffers = [] if module is None else list(module.buffers())
        resolved = resolve(config, options)
        transport = connect(process_group, getattr(resolved, "timeout", None))
        self.rounds = Rounds(optimizer, resolved, transport, self.monitor, buffers, module)
        self._hidden: AbstractContextManager[None] | None = None
        self._overflowed: list[tuple[Tensor, Tensor]] = []
        self._warmup_bytes = self._backwards = 0
        self._probe = False
        self._native_scaling = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # Otherwise GradScaler would not call `step` on a rank that overflowed, and that rank would miss a round.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._loading: dict[str, Any] = {}
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self.rounds.runner.store_corrections()
        self._loading = state_dict

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        restore_own_entries(optimizer, self._loading)
        self._loading = {}
        self.rounds.enter_hyperparameters()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._probe = is_state_probe(optimizer, closure)
        self.rounds.before_step()
        self._hidden = self.rounds.runner.own.hidden()
        self._hidden.__enter__()
        scaling = Scaling.of(optimizer)
        if not self._native_scaling and scaling.found_inf is not None:
            parameters = list(self.rounds.replica.every_parameter().values())
            scaling.unscale_(parameters)
            if scaling.overflowed:
                # Without gradients the optimizer's step changes nothing, which is how to skip it from a hook.
                self._overflowed = [(p, p.grad) for p in parameters if p.grad is not None]
                for parameter, _ in self._overflowed:
                    parameter.grad = None
            # Optimizers without own scaling refuse to step while these are set.
            optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._hidden is not None
        self._hidden.__exit__(None, None, None)
        for parameter, gradient in self._overflowed:
            parameter.grad = gradient
        self._overflowed = []
        if self._probe:
            return
        self._backwards = 0
        self.rounds.after_step()

    def all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of a bucket over the workers: what DDP does, in the warm-up."""
        buffer, transport = bucket.buffer(), self.rounds.transport
        assert isinstance(transport, DistributedTransport)
        self._warmup_bytes += ring_all_reduce_bytes(buffer.nbytes, transport.size)
        if bucket.is_last():
            sent, self._warmup_bytes = self._warmup_bytes, 0
            step = self.rounds.group["decent_step"] + 1
            self.monitor.emit(RoundRecord("gradient", step, -1, {-1: sent}, {-1: sent}, sent))
        return all_reduced(buffer, transport.group, transport.size)

    def note_backward(self) -> None:
        """Notice an optimizer that is never stepped: a copy, or another one than was given to this state."""
        self._backwards += 1
        if self._backwards == _SUSPICIOUS_BACKWARDS:
            logger.warning(
                "gossip_hook has seen %d backward passes and no step of the optimizer that GossipState was given; "
                "no round runs unless the training loop steps this very object",
                self._backwards,
            )


def gossip_hook(state: GossipState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: gradients stay local (in the warm-up they are averaged); rounds run in the step."""
    if bucket.is_last():
        state.note_backward()
    if state.rounds.averages_gradients:
        return state.all_reduce(bucket)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
