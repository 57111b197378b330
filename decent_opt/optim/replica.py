"""Which tensors make up this worker's replica of the model: the trainable parameters of an optimizer, each once."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_opt.gossip.buckets import check_mixable

OWN_PREFIX = "decent_"  # our entries in optimizer.state[param] and in param_groups start with this


class Replica:
    """The parameters of an optimizer's groups. Read anew at every round, so that (un)freezing takes effect.

    Args:
        optimizer: the base optimizer.
        model: parameters get their names from it; else from the groups' `param_names`, else by their place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> None:
        self.optimizer = optimizer
        self._names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}

    def parameters(self) -> dict[str, Tensor]:
        """Name -> parameter, frozen ones too; of those that share their memory one, a trainable one if there is any."""
        found: dict[object, tuple[str, Tensor]] = {}
        for name, parameter in self.every_parameter().items():
            # Views of the same memory, also transposed or flat, have the same start, count and extent.
            extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            key = (parameter.data_ptr(), parameter.numel(), extent) if parameter.data_ptr() else id(parameter)
            if key not in found or (parameter.requires_grad and not found[key][1].requires_grad):
                found[key] = (name, parameter)
        return dict(found.values())

    def every_parameter(self) -> dict[str, Tensor]:
        """Name -> parameter, also those that share their memory: each has a gradient of its own."""
        named: dict[str, Tensor] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            known = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                fallback = known[place] if known else f"{place} of group {index}"
                name = self._names.get(id(parameter), fallback)
                # Two modules in two groups may use the same names.
                named[name if name not in named else f"{name} of group {index}"] = parameter
        return named

    def trainable(self) -> dict[str, Tensor]:
        """Name -> parameter that requires a gradient: what is mixed."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def momenta(self) -> dict[str, Tensor]:
        """Name -> state tensor of the base optimizer with its parameter's shape (momentum, moments)."""
        state = self.optimizer.state
        return {
            f"{name}:{key}": value
            for name, parameter in self.trainable().items()
            for key, value in sorted(state.get(parameter, {}).items())
            if not key.startswith(OWN_PREFIX)
            and key != "step"
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
        }


def describe(tensors: dict[str, Tensor]) -> dict[str, str]:
    """One line per tensor that has to be equal on all ranks: shape, dtype, memory order, requires_grad.

    Raises:
        ConfigError: a tensor cannot be averaged; the message names it.
    """
    lines = {}
    for name, tensor in tensors.items():
        check_mixable(tensor, name)
        order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
        memory = "" if order == sorted(order) else f", memory order {order}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines[f"parameter {name}"] = (
            f"shape {tuple(tensor.shape)}, dtype {dtype}{memory}, requires_grad {tensor.requires_grad}"
        )
    return lines
