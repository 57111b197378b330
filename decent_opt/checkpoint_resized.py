"""Resume on another number of workers: all start alike, from the mean of what was saved.

    x_k' = (1/N) sum_i x_i           for each of the n new workers: the consensus model of the N saved ones

The mean of the workers moves like one optimizer on the mean gradient (for SGDM exactly, any doubly stochastic W), and
its momentum is the mean of theirs; so all floating state of the base optimizer and of outer momentum is averaged.
Counters are rank 0's. Of what only makes sense between the old workers:

    corrections of a round in flight     sum to zero over the workers, so the mean has them already
    public copies, pulls                 begin anew: one exact average at the next round, then xhat = x
    residuals of error feedback          every worker gets the mean, so (1/n) sum_k e_k, what the averaged gradient is
                                         still owed, is kept
    control variates h_i, hbar           every worker gets the mean of the h_i, which is hbar
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decent_opt.optim.own_state import COPY, CORRECTION, PULL, REMAINDER

logger = logging.getLogger(__name__)
_BEGIN_ANEW = (COPY, PULL, CORRECTION)


def resized(
    parts: Iterable[dict[str, Any]],
    saved: int,
    rank: int,
    workers: int,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """The part of worker `rank` of `workers`, made of all `saved` parts, which are read one after the other.

    Args:
        parts: what `checkpoint.read` returned, of ranks 0 .. saved - 1.
        saved: N.
        rank: of this worker.
        workers: n.
        model, optimizer: tell which 16-bit parameter a remainder in the optimizer's state belongs to.
    """
    state: dict[str, Any] = {}
    mean: dict[str, Any] = {}
    dtypes: dict[str, Any] = {}
    extra: Any = None
    for index, part in enumerate(parts):
        if index == 0:
            state = part
        if index == rank % saved:
            extra = part["extra"]
        _add(mean, dtypes, {name: part[name] for name in ("model", "optimizer", "hook")})
    _divide(mean, saved)
    _split_remainders(mean, model, optimizer)
    state.update(_narrow(mean, dtypes))
    if state["optimizer"] is not None:
        for entries in state["optimizer"]["state"].values():
            for key in _BEGIN_ANEW:
                entries.pop(key, None)
    if state["hook"] is not None and "workers" in state["hook"]:
        state["hook"] = {**state["hook"], "workers": workers, "rank": rank}
    state["extra"] = extra
    if rank == 0:
        logger.warning(
            "resumed with %d workers what %d have saved: all start from the mean of the saved models and optimizer "
            "states; public copies begin anew; residuals of error feedback are dealt out so that their mean is kept",
            workers,
            saved,
        )
    return state


def _split_remainders(mean: dict[str, Any], model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    """A 16-bit parameter is rounded from its mean value, parameter and remainder, and the remainder is what is left."""
    if model is None or optimizer is None or mean["model"] is None or mean["optimizer"] is None:
        return
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.removeprefix("module."))
    live = [(p, p.dtype) for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in mean["optimizer"]["param_groups"] for index in group["params"]]
    for index, (parameter, dtype) in zip(indices, live, strict=True):
        entries = mean["optimizer"]["state"].get(index, {})
        if REMAINDER not in entries:
            continue
        for name in names.get(id(parameter), ()):
            value = mean["model"][name].float() + entries[REMAINDER]
            rounded = value.to(dtype)
            mean["model"][name] = rounded
        entries[REMAINDER] = value - rounded.float()


def _add(total: dict[str, Any], dtypes: dict[str, Any], part: Mapping[str, Any]) -> None:
    """total += part, in float32 at least; what is no floating tensor stays what it was in the first part that has it.

    Parts need not have the same entries: a parameter that was not used on a rank has no momentum there, which is zero.
    """
    for key, item in part.items():
        if isinstance(item, Mapping):
            _add(total.setdefault(key, {}), dtypes.setdefault(key, {}), item)
        elif not isinstance(item, Tensor) or not item.is_floating_point():
            total.setdefault(key, item)
        elif key in total:
            total[key].add_(item)
        else:
            total[key] = item.to(torch.promote_types(item.dtype, torch.float32), copy=True)
            dtypes[key] = item.dtype


def _divide(total: dict[str, Any], parts: int) -> None:
    for item in total.values():
        if isinstance(item, dict):
            _divide(item, parts)
        elif isinstance(item, Tensor) and item.is_floating_point():
            item.div_(parts)


def _narrow(mean: dict[str, Any], dtypes: dict[str, Any]) -> dict[str, Any]:
    """Back in the dtypes that were saved."""
    return {
        key: _narrow(item, dtypes[key]) if isinstance(item, dict) else item.to(dtypes[key]) if key in dtypes else item
        for key, item in mean.items()
    }
