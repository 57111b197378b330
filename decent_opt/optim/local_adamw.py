"""LocalAdamW: AdamW for local steps, with a second moment that belongs to the averaged gradient.

A worker's own second moment is that of a noisy gradient: E g_k^2 = gbar^2 + s^2, where the averaged gradient that
DDP's AdamW sees has gbar^2 + s^2 / n. Local AdamW therefore divides by up to sqrt(n) too much, and the averaged
model moves too slowly, at any period. So the second moment is learned while gradients are still averaged, in the
warm-up, and kept afterwards; the first moment stays local. Per parameter tensor, with elementwise squares:

    warm-up, gbar = mean of the workers' g:   v <- b2 v + (1 - b2) gbar^2          AdamW as under DDP
                                              u <- b2 u + (1 - b2) g^2             own gradient's, for the floor
                                              a <- b ||gbar||^2 ..., s <- b ||g||^2 ...   levels, short memory b
    at its end:                               V = v / (1 - b2^t),   c = (a / s) / sum(V)
    afterwards, "trend":                      v^ = max(c s V, f u^ / n)            s, u go on with the own g
                "frozen":                     v^ = max(V, f u^ / n)
                "refreshed":                  as frozen, and V <- r V + (1 - r) gbar^2 at one synchronous step
                                              after every R-th round
                "local":                      plain AdamW, v^ from the own g
    always:                                   m <- b1 m + (1 - b1) g;   x <- (1 - lr decay) x - lr m^ / (sqrt(v^) + eps)

"trend" keeps the shape of V within each tensor and lets its level follow the own gradient: s(t) measures how the
level has changed, and a / s, measured in the warm-up, is the share of it that averaging leaves. The floor protects
coordinates that the warm-up has hardly seen (rare tokens), whose V is close to 0: n workers cannot average away
more than a factor n. A tensor that the warm-up has not seen at all (unfrozen or added later) goes on as under AdamW.
The rule is our own; `benchmarks/adam_gap.py` measures it against the others.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decent_opt.config import DecentConfig, given
from decent_opt.errors import ConfigError
from decent_opt.optim.decentralized import Closure, Decentralized
from decent_opt.optim.replica import OWN_PREFIX

SecondMoment = Literal["trend", "frozen", "refreshed", "local"]
RULES = ("trend", "frozen", "refreshed", "local")

OWN_SQUARE = OWN_PREFIX + "own_square"  # u
OWN_LEVEL = OWN_PREFIX + "own_level"  # s
MEAN_LEVEL = OWN_PREFIX + "mean_level"  # a during the warm-up, c afterwards
FLOOR = OWN_PREFIX + "floor"  # f / n, or 1 for a tensor without statistics of the warm-up
_LEVEL_MEMORY = 0.9  # b
_FLOOR = 0.2  # f


class SharedMomentAdamW(torch.optim.AdamW):
    """AdamW whose second moment can be fixed after a warm-up; the base that `LocalAdamW` wraps.

    Every group carries "second_moment" (the rule) and "second_moment_fixed" (0 until the warm-up ends, then 1); the
    first group's are in force.
    """

    HYPERPARAMETERS = ("second_moment", "second_moment_fixed", "refresh_every", "refresh_memory")

    def __init__(
        self, params: ParamsT, *, second_moment: str, refresh_every: int, refresh_memory: float, **adamw: Any
    ) -> None:
        super().__init__(params, **adamw)
        self.defaults.update(
            second_moment=second_moment,
            second_moment_fixed=0,
            refresh_every=refresh_every,
            refresh_memory=refresh_memory,
        )
        self._enter_own_defaults()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter_own_defaults()

    def _enter_own_defaults(self) -> None:
        """A loaded checkpoint of a plain AdamW has none of these."""
        for group in self.param_groups:
            for name in self.HYPERPARAMETERS:
                group.setdefault(name, self.defaults[name])

    @property
    def _rule(self) -> str:
        return str(self.param_groups[0]["second_moment"])

    @property
    def _fixed(self) -> bool:
        return bool(self.param_groups[0]["second_moment_fixed"])

    def claims(self, config: DecentConfig) -> dict[str, str]:
        """Check what `LocalAdamW` was given, and name what all ranks must have alike."""
        group = self.param_groups[0]
        every, memory = group["refresh_every"], group["refresh_memory"]
        if self._rule not in RULES:
            raise ConfigError(f"second_moment: allowed are {', '.join(RULES)}, got {group['second_moment']!r}")
        if self._rule != "local" and not config.warmup_steps:
            raise ConfigError(
                f"warmup_steps: got {config.warmup_steps}, but the second moment is learned in the warm-up; give it "
                '20 to 30 % of all steps, or choose second_moment="local"'
            )
        if type(every) is not int or every < 1:
            raise ConfigError(f"refresh_every: allowed is an integer >= 1, got {every!r}")
        if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 <= memory < 1:
            raise ConfigError(f"refresh_memory: allowed is a number >= 0 and < 1, got {memory!r}")
        return {name: repr(group[name]) for name in ("second_moment", "refresh_every", "refresh_memory")}

    def wants_average(self, round: int) -> bool:
        """Is the step after this many rounds a synchronous one?  "refreshed": after every R-th."""
        return self._rule == "refreshed" and round > 0 and round % self.param_groups[0]["refresh_every"] == 0

    def observe_own_gradients(self) -> None:
        """u <- b2 u + (1 - b2) g^2;  s <- b s + (1 - b) ||g||^2, from gradients that are not averaged yet.

        After the warm-up every step does this by itself.
        """
        if self._fixed:
            return
        for group in self.param_groups:
            entries, _, gradients = self._stepped(group)
            if entries and self._rule != "local":
                _follow_squares([e[OWN_SQUARE] for e in entries], gradients, group["betas"][1])
                _follow_levels([e[OWN_LEVEL] for e in entries], gradients)

    def observe_mean_gradients(self) -> None:
        """In the warm-up a <- b a + (1 - b) ||gbar||^2; at a refresh V <- r V + (1 - r) gbar^2."""
        for group in self.param_groups:
            entries, _, gradients = self._stepped(group)
            if entries and not self._fixed:
                _follow_levels([e[MEAN_LEVEL] for e in entries], gradients)
            elif entries:
                _follow_squares([e["exp_avg_sq"] for e in entries], gradients, group["refresh_memory"])

    def end_warmup(self, workers: int) -> None:
        """V = v / (1 - b2^t) takes v's place, c = (a / s) / sum(V) that of a; from here on `step` uses them."""
        if self._rule == "local":
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state.get(parameter, {})
                if "exp_avg_sq" not in own or not (steps := own["step"].item()):
                    continue  # no gradient so far
                V = own["exp_avg_sq"].div_(1 - group["betas"][1] ** steps)
                share = torch.where(own[OWN_LEVEL] > 0, own[MEAN_LEVEL] / own[OWN_LEVEL], 1.0)
                own[MEAN_LEVEL].copy_(share / V.sum(dtype=_wide(V)).clamp(min=1e-38))
                own[OWN_LEVEL].div_(1 - _LEVEL_MEMORY**steps)
                own[FLOOR] = _FLOOR / workers
            group["second_moment_fixed"] = 1

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step; plain AdamW until `end_warmup`."""
        if not self._fixed:
            if not self.state:
                # All entries appear together: checkpoint tools take the keys of a first step as the whole list.
                for group in self.param_groups:
                    self._stepped(group)
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_with_fixed_moment(group)
        return loss

    def _step_with_fixed_moment(self, group: dict[str, Any]) -> None:
        """m <- b1 m + (1 - b1) g;   x <- (1 - lr decay) x - lr m^ / (sqrt(v^) + eps)."""
        entries, parameters, gradients = self._stepped(group)
        if not entries:
            return
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        steps = [e["step"] for e in entries]
        torch._foreach_add_(steps, 1)
        first = [e["exp_avg"] for e in entries]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        counts = [t.item() for t in steps]
        own_squares, moments = [e[OWN_SQUARE] for e in entries], [e["exp_avg_sq"] for e in entries]
        _follow_squares(own_squares, gradients, beta2)
        roots = list(
            torch._foreach_mul(own_squares, [e[FLOOR] / (1 - beta2**t) for e, t in zip(entries, counts, strict=True)])
        )
        if self._rule == "trend":
            own_levels = [e[OWN_LEVEL] for e in entries]
            _follow_levels(own_levels, gradients)
            scale = torch._foreach_mul([e[MEAN_LEVEL] for e in entries], own_levels)
            moments = [V * c for V, c in zip(moments, scale, strict=True)]
        torch._foreach_maximum_(roots, moments)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, first, roots, [-lr / (1 - beta1**t) for t in counts])

    def _stepped(self, group: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
        """State, parameters and gradients of those with a gradient; missing state is made, torch's own too."""
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            own = self.state[parameter]
            if "exp_avg" not in own:
                own["step"] = torch.tensor(0.0)
                for name in ("exp_avg", "exp_avg_sq"):
                    own[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if OWN_SQUARE not in own and self._rule != "local":
                own[OWN_SQUARE] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                own[FLOOR] = 1.0
            for name in (OWN_LEVEL, MEAN_LEVEL):
                if name not in own:
                    own[name] = torch.zeros((), dtype=_wide(parameter), device=parameter.device)
        return [self.state[p] for p in parameters], parameters, [p.grad for p in parameters]


def _follow_squares(squares: list[Tensor], gradients: list[Tensor], memory: float) -> None:
    """square <- memory square + (1 - memory) g^2, elementwise."""
    torch._foreach_mul_(squares, memory)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - memory)


def _follow_levels(levels: list[Tensor], gradients: list[Tensor]) -> None:
    """level <- b level + (1 - b) ||g||^2, one number per tensor."""
    norms = torch._foreach_norm(gradients, 2, _wide(gradients[0]))
    torch._foreach_lerp_(levels, torch._foreach_mul(norms, norms), 1 - _LEVEL_MEMORY)


def _wide(tensor: Tensor) -> torch.dtype:
    """Sums over a whole tensor need float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


class LocalAdamW(Decentralized):
    """AdamW with local steps and a second moment learned from averaged gradients.

        optimizer = LocalAdamW(model.parameters(), lr=1e-3, warmup_steps=300, period=8)

    In a world of one rank it is `torch.optim.AdamW`.

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        warmup_steps: steps of averaged gradients; 20 to 30 % of all steps is a good share. Required, here or in
            `config`.
        second_moment: "trend" (default), "frozen", "refreshed" or "local"; see the module.
        refresh_every: with "refreshed": R, rounds between two synchronous steps.
        refresh_memory: with "refreshed": r, the weight of the old value.
        period, topology, outer_momentum, options: as in `Decentralized`; None: from `config`, else 8, "ring", 0.5.

    Raises:
        ConfigError: as `Decentralized`; or there is no warm-up to learn from.
    """

    config_defaults: ClassVar[dict[str, Any]] = {"outer_momentum": 0.5}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int | None = None,
        second_moment: SecondMoment = "trend",
        refresh_every: int = 4,
        refresh_memory: float = 0.9,
        period: Any = None,
        topology: Any = None,
        outer_momentum: float | None = None,
        **options: Any,
    ) -> None:
        base = SharedMomentAdamW(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            second_moment=second_moment,
            refresh_every=refresh_every,
            refresh_memory=refresh_memory,
        )
        own = given(warmup_steps=warmup_steps, period=period, topology=topology, outer_momentum=outer_momentum)
        super().__init__(base, **own, **options)

    def plain_state_dict(self) -> dict[str, Any]:
        """A state dict for `torch.optim.AdamW`; V goes back to what AdamW's bias correction expects."""
        fixed = self.param_groups[0]["second_moment_fixed"]
        plain = super().plain_state_dict()
        for group in plain["param_groups"]:
            for name in SharedMomentAdamW.HYPERPARAMETERS:
                del group[name]
            for index in group["params"]:
                if fixed and index in plain["state"]:
                    entries = plain["state"][index]
                    scale = 1 - group["betas"][1] ** float(entries["step"])
                    plain["state"][index] = {**entries, "exp_avg_sq": entries["exp_avg_sq"] * scale}
        return plain
