"""Decentralized: PD-SGDM around any torch optimizer.

Every worker steps its own optimizer on its own data; every p steps it averages its parameters with its neighbours'
(arXiv 2008.10435). The wrapper is a `torch.optim.Optimizer` in every way that schedulers, GradScaler, checkpoint
tools and training frameworks look at; its `state` and `param_groups` are the base's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from decent_opt.communication import Hosts, connect
from decent_opt.config import DecentConfig, resolve
from decent_opt.config_sources import Source
from decent_opt.errors import ConfigError
from decent_opt.monitoring import Monitor, RoundRecord
from decent_opt.optim.amp import Scaling, scaled_step
from decent_opt.optim.hyperparameters import ROUND, STEP
from decent_opt.optim.own_state import restore_own_entries, without_own_entries
from decent_opt.optim.rounds import Rounds

Closure = Callable[[], Any]


class Decentralized(torch.optim.Optimizer):
    """Wrap a torch optimizer: local steps, and a round of gossip every `period` of them.

        optimizer = Decentralized(torch.optim.AdamW(model.parameters()), period=8, topology="ring")

    Construction is collective: it compares the configuration between the ranks and broadcasts rank 0's parameters.
    In a world of one rank it does exactly what the base does.

    Args:
        base: any torch optimizer on this worker's parameters.
        model: the model they belong to. Its buffers are then equal at the start and averaged in `consensus_`, and
            errors name parameters as the model does.
        config: where options come from that are not given as arguments: a JSON or YAML file, a dict or a
            `DecentConfig`. Default: what the environment variable DECENT_OPT_CONFIG names.
        sinks: called with each `RoundRecord`.
        process_group: the workers that mix; default the whole world. Or `Hosts`, whose ranks hold the same parameters
            inside a host, because their gradients are averaged there at every step (see `decentralize`).
        options: the fields of `DecentConfig`: period, topology, warmup_steps, global_every, outer_momentum,
            momentum_sync, algorithm, compressor, order, gamma, bucket_mb, timeout, sync_init ...

    Raises:
        ConfigError: an option is not allowed, or a parameter's dtype cannot be averaged.
        Disagreement: the ranks are not configured alike (within 10 s of the arrival of the last).
        PeerLost: from `step`, when a peer does not take part in a round within `timeout` seconds.
    """

    # GradScaler then calls `step` on an overflow too, so that a rank that skips its update still joins the round.
    _step_supports_amp_scaling = True
    # What a subclass takes where neither the arguments nor `config` say anything.
    config_defaults: ClassVar[dict[str, Any]] = {}

    base: torch.optim.Optimizer
    monitor: Monitor
    _config: DecentConfig | ConfigError
    _buffers: list[Tensor]
    _subset: bool
    _fresh: bool
    _rounds: Rounds | None

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        config: Source = None,
        sinks: Iterable[Callable[[RoundRecord], object]] = (),
        process_group: dist.ProcessGroup | Hosts | None = None,
        **options: Any,
    ) -> None:
        if isinstance(base, Decentralized) or not isinstance(base, torch.optim.Optimizer):
            raise ConfigError(f"base: a torch optimizer that is not decentralised already, got {type(base).__name__}")
        resolved = resolve(config, options, self.config_defaults)
        self.__setstate__(
            {"base": base, "_config": resolved, "_buffers": list(model.buffers()) if model is not None else []}
        )
        self.monitor = Monitor(sinks)
        self._subset, self._fresh = process_group is not None, True
        self.connect(process_group, model)

    def connect(
        self, process_group: dist.ProcessGroup | Hosts | None = None, model: torch.nn.Module | None = None
    ) -> Rounds:
        """Join the other workers; collective. The constructor does it, and the first use after unpickling.

        Raises:
            ConfigError: the optimizer was made for a process group, which cannot be unpickled; pass it again.
        """
        if self._subset and process_group is None:
            raise ConfigError("process_group: made for one, so after copying or unpickling call connect(process_group)")
        timeout, inside = getattr(self._config, "timeout", None), None
        if isinstance(process_group, Hosts):
            inside, process_group = connect(process_group.inside, timeout), process_group.across
        transport = connect(process_group, timeout)
        self._rounds = Rounds(
            self.base, self._config, transport, self.monitor, self._buffers, model, inside, fresh=self._fresh
        )
        # Copied and loaded workers differ on purpose: only new ones start from rank 0's parameters.
        self._fresh = False
        return self._rounds

    @property
    def rounds(self) -> Rounds:
        """What this worker does besides the base optimizer's step."""
        if (rounds := self._rounds) is None:
            rounds = self.connect()
        return rounds

    # -- the optimizer that torch sees ---------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The base's state, ours included: entries whose keys start with "decent_"."""
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        self.base.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's groups; they carry our hyperparameters and the counters too."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.base.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The base's defaults."""
        return self.base.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.base.defaults = value

    def __getstate__(self) -> dict[str, Any]:
        # Transport and process group belong to a process and are found anew; records stay with the original.
        if self._rounds is not None:
            self._rounds.runner.store_corrections()
        return {name: self.__dict__[name] for name in ("base", "_config", "_buffers", "_subset")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Optimizer.__init__ would make groups and state of its own. Torch's route for unpickled optimizers sets up
        # the rest (hooks, profiling) without touching them, so the constructor takes it too.
        self._rounds = None
        self._subset = self._fresh = False
        self.monitor = Monitor()
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; every rank does it at the same step. Rank 0's values are broadcast."""
        self.base.add_param_group(param_group)
        self.rounds.admit(self.param_groups[-1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict with our entries and counters: this rank's own, no other rank is needed.

        A round in flight is waited for, and its pending correction is stored.
        """
        if self._rounds is not None:
            self._rounds.runner.store_corrections()
        return self.base.state_dict()

    def plain_state_dict(self) -> dict[str, Any]:
        """A state dict for the bare base optimizer, to go on with plain DDP: nothing of ours is in it.

        Call `consensus_()` first, so that all ranks go on from the same parameters.
        """
        return without_own_entries(self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of a plain base optimizer (then rounds begin from 0)."""
        if self._rounds is not None:
            self._rounds.runner.store_corrections()  # what the neighbours have sent has to be taken, if not used
        self.base.load_state_dict(state_dict)
        restore_own_entries(self.base, state_dict)
        if self._rounds is not None:
            self._rounds.enter_loaded()

    # The base runs these hooks, around its own work; they are told of the optimizer that the user knows.
    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        return self.base.register_state_dict_pre_hook(lambda _: hook(self), prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        return self.base.register_state_dict_post_hook(lambda _, saved: hook(self, saved), prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        return self.base.register_load_state_dict_pre_hook(lambda _, saved: hook(self, saved), prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        return self.base.register_load_state_dict_post_hook(lambda _: hook(self), prepend)

    # -- training ------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> Any:
        """One local step of the base; every `period` steps a round with the neighbours.

        Args:
            closure: as the base takes it; in the warm-up the gradients are averaged after each call.

        Returns:
            What the base returns: the closure's loss or None.
        """
        rounds = self.rounds
        probe = is_state_probe(self.base, closure)
        rounds.before_step()
        with rounds.runner.own.hidden():
            result = self.base.step(closure) if probe else self._local_step(closure)
        if not probe:
            rounds.after_step()
        return result

    def _local_step(self, closure: Closure | None) -> Any:
        rounds = self.rounds
        averages = rounds.averages_gradients and rounds.anyone_goes_on()
        if not averages and getattr(self, "found_inf", None) is None:
            return self.base.step(closure)
        scaling = Scaling.of(self)
        if averages:
            if closure is not None:
                return self.base.step(rounds.averaging(closure))
            scaling.unscale_(rounds.replica.every_parameter().values())
            anyone_overflowed = rounds.average_gradients(scaling.found_inf)
            if scaling.found_inf is not None:
                scaling.found_inf = anyone_overflowed
        if scaling.found_inf is None:
            return self.base.step(closure)
        return scaled_step(self.base, scaling, rounds.replica.every_parameter().values())

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train on data of different length: `with optimizer.join(): for batch in data: ...`. Collective.

        A worker that has no batch left goes on mixing its parameters with the others', and in the warm-up takes their
        mean gradient, until nobody has one; all leave the block at the same step. None may be without data from the
        start, too. Before each exchange the workers tell each other whether they go on: one number more.
        """
        rounds = self.rounds
        rounds.has_data, rounds.over = True, rounds.alone
        try:
            yield
            rounds.has_data = False
            while not rounds.over:
                self.zero_grad()
                self.step()
        finally:
            rounds.has_data, rounds.over = None, False

    # -- consensus -----------------------------------------------------------------------------------------------

    def consensus_(self) -> None:
        """x_k <- (1/n) sum_j x_j on every rank, floating-point buffers too; collective."""
        self.rounds.consensus_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate on the workers' average; each worker's own parameters come back after the block. Collective."""
        with self.rounds.averaged():
            yield

    def consensus_distance(self) -> float:
        """Return sqrt((1/n) sum_k ||x_k - xbar||^2). Collective; costs one all-reduce of the model."""
        return self.rounds.consensus_distance()

    @property
    def decent_step(self) -> int:
        """Optimizer steps finished."""
        return int(self.param_groups[0][STEP])

    @property
    def decent_round(self) -> int:
        """Rounds finished."""
        return int(self.param_groups[0][ROUND])

    def close(self) -> None:
        """Complete a round in flight and release the process group; collective, optional, after the last step."""
        if self._rounds is not None:
            self._rounds.close()


def is_state_probe(optimizer: torch.optim.Optimizer, closure: Closure | None) -> bool:
    """Is this call of `step` only meant to create the optimizer's state?

    torch.distributed.checkpoint (`get_optimizer_state_dict`, `set_optimizer_state_dict`) steps an optimizer without
    state once, with lr 0 and zero gradients. That is no training step, and it happens on one rank as well as on all.
    A first step of a warm-up from lr 0 on an empty batch looks the same from inside, so the caller decides.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    if closure is not None or optimizer.state or any(lr is None or float(lr) for lr in rates):
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame.f_code.co_name == "_init_optim_state"
