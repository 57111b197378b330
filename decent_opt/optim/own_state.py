"""Our entries in `optimizer.state[param]`, beside the base optimizer's own.

    decent_x_prev, decent_outer_momentum     outer momentum (outer.py)
    decent_remainder                         what a 16-bit parameter lacks to its float32 value, 0 at first
    decent_correction                        of a round in flight, when the state is saved before it is applied
    decent_public_copy, decent_pull          CPD-SGDM: xhat, and z = sum_j w_kj (xhat_j - xhat_k)

They are made at the first step, together with the base's state. Torch's optimizers make theirs for a parameter when
`len(state[param]) == 0`, so ours are hidden while the base steps a parameter for the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from decent_opt.gossip.buckets import flatten
from decent_opt.optim import outer
from decent_opt.optim.hyperparameters import OURS
from decent_opt.optim.replica import OWN_PREFIX

REMAINDER = OWN_PREFIX + "remainder"
CORRECTION = OWN_PREFIX + "correction"
COPY = OWN_PREFIX + "public_copy"
PULL = OWN_PREFIX + "pull"
_NOTHING = nullcontext()


class OwnState:
    """Creates our entries and hides them where the base must not see them yet; `public_copies`: CPD-SGDM's, too."""

    def __init__(self, optimizer: torch.optim.Optimizer, public_copies: bool = False) -> None:
        self.optimizer, self.public_copies = optimizer, public_copies
        self._bare: list[Tensor] = []

    def create(self, parameters: Iterable[Tensor], outer_momentum: bool) -> None:
        """Make the entries that are missing: x_prev = x, v = 0, remainder = 0; xhat = x, z = 0."""
        state = self.optimizer.state
        for parameter in parameters:
            if parameter.dtype.itemsize == 2 and REMAINDER not in state.get(parameter, {}):
                state[parameter][REMAINDER] = like(parameter, torch.float32)
            if outer_momentum and outer.X_PREV not in state.get(parameter, {}):
                outer.create(state[parameter], parameter)
            if self.public_copies and COPY not in state.get(parameter, {}):
                wide = torch.promote_types(parameter.dtype, torch.float32)
                state[parameter][COPY] = like(parameter, wide).copy_(parameter.detach())
                state[parameter][PULL] = like(parameter, wide)
                if (remainder := state[parameter].get(REMAINDER)) is not None:
                    state[parameter][COPY].add_(remainder)
        self._bare = [p for p, entries in state.items() if _is_bare(entries)]

    def hidden(self) -> AbstractContextManager[None]:
        """Hide our entries of parameters that the base has not stepped yet, while it does."""
        return self._hide() if self._bare else _NOTHING

    @contextmanager
    def _hide(self) -> Iterator[None]:
        hidden = {parameter: self.optimizer.state.pop(parameter, {}) for parameter in self._bare}
        try:
            yield
        finally:
            for parameter, entries in hidden.items():
                self.optimizer.state[parameter].update(entries)
            self._bare = [p for p in self._bare if _is_bare(self.optimizer.state[p])]

    def remainders(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The remainder of each tensor; None for 32-bit parameters and for what is no parameter."""
        # `get` with a default never makes an entry, unlike `state[tensor]`.
        return [self.optimizer.state.get(tensor, {}).get(REMAINDER) for tensor in tensors]

    def put_corrections(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Make room for a correction per parameter."""
        for parameter in parameters:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            self.optimizer.state[parameter][CORRECTION] = like(parameter, wide)
        self._bare = [p for p, entries in self.optimizer.state.items() if _is_bare(entries)]
        return [self.optimizer.state[p][CORRECTION] for p in parameters]

    def take_corrections(self) -> dict[Tensor, Tensor]:
        """Parameter -> correction, of all that are stored; they are removed."""
        state = self.optimizer.state
        found = {p: entries.pop(CORRECTION) for p, entries in state.items() if CORRECTION in entries}
        for parameter in found:
            if not state[parameter]:
                del state[parameter]
        return found


def like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the parameter's shape, in the order of elements in which its bucket has them."""
    if flatten(parameter)[1]:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return torch.zeros_like(parameter, dtype=dtype)


def restore_own_entries(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """After `load_state_dict`: torch casts floating state to the parameter's dtype, and ours is wider on purpose."""
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    live = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in zip(saved, live, strict=True):
        for key, value in state_dict["state"].get(index, {}).items():
            if str(key).startswith(OWN_PREFIX) and isinstance(value, Tensor):
                optimizer.state[parameter][key] = value.detach().to(parameter.device, copy=True)


def without_own_entries(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict in which nothing of ours is left."""
    state = {
        index: {k: v for k, v in entries.items() if not str(k).startswith(OWN_PREFIX)}
        for index, entries in state_dict["state"].items()
    }
    groups = [{k: v for k, v in group.items() if k not in OURS} for group in state_dict["param_groups"]]
    return {**state_dict, "state": {i: e for i, e in state.items() if e}, "param_groups": groups}


def _is_bare(entries: dict[str, Any]) -> bool:
    return bool(entries) and all(str(key).startswith(OWN_PREFIX) for key in entries)
