"""Save and resume a run: every rank its own part, in torch.distributed.checkpoint's format.

    checkpoint.save("runs/step-1000", model=model, optimizer=optimizer, extra={"scheduler": scheduler.state_dict()})
    extra = checkpoint.load("runs/step-1000", model=model, optimizer=optimizer)

Between rounds the workers differ on purpose: in parameters, moments, public copies, residuals. One file of rank 0
loses all others, and torch.distributed.checkpoint itself keeps one rank's copy of a plain tensor that is stored under
one key. So rank r of n writes `rank-r-of-n` inside the folder, a checkpoint for itself. No rank waits for another one:
one may save alone, and `async_save` writes in a thread. A round in flight is part of the optimizer's state.

With as many ranks as were saved, every rank gets its own part back, to the bit. With another number all start from
the mean of the saved models; what becomes of the rest is said in `checkpoint_resized`.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from decent_opt.checkpoint_resized import resized
from decent_opt.communication import agreement, connect, place
from decent_opt.errors import ConfigError

__all__ = ["async_save", "latest", "load", "save", "saved_ranks"]

_REST = "the rest"
_TENSOR = "\0tensor:"
_NAME = re.compile(r"rank-(\d+)-of-(\d+)")
_threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decent_opt checkpoint")


class HasState(Protocol):
    """Anything with `state_dict` and `load_state_dict`: the state of one of our DDP hooks, `ISAGA`, a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def save(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hook: HasState | None = None,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's part; every rank calls it, in any order and at any time.

    Args:
        folder: of this save alone, shared by all ranks.
        model: its parameters and buffers; a DDP or compiled model is unwrapped.
        optimizer: any; a round of ours that is in flight is waited for, and its correction is saved.
        hook: the state of `block_sparse_hook` or `compressed_hook`, or of anything else that differs by rank.
        extra: numbers, strings, tensors, and lists and dicts of these: counters, a scheduler's state, random states.
        process_group: the workers, where they are not the whole world.

    Raises:
        ConfigError: this rank's part is there already; or `extra` has what cannot be loaded without running code.
    """
    own, entries = _collect(folder, model, optimizer, hook, extra, process_group)
    _write(own, entries)


def async_save(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hook: HasState | None = None,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """`save`, which copies everything to host memory at once and writes in a thread; call `result()` before the next.

    Training may go on: what is written is what was there when this was called.
    """
    own, entries = _collect(folder, model, optimizer, hook, extra, process_group)
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in entries.items()}
    return _threads.submit(_write, own, copies)


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hook: HasState | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Read this rank's part back; collective.

    Returns:
        What was given as `extra`; on another number of ranks that of rank r modulo the saved number.

    Raises:
        ConfigError, Disagreement: on every rank, also if only one cannot read its part: no checkpoint, one that is
            not complete, one whose ranks were saved at different steps, or one of another model or optimizer.
    """
    transport = connect(process_group)
    try:
        transport.gather("has written what it writes")
        with agreement(transport):
            ranks = saved_ranks(folder)
            if ranks == transport.size:
                state = read(Path(folder), transport.rank, ranks)
            else:
                parts = (read(Path(folder), rank, ranks) for rank in range(ranks))
                state = resized(parts, ranks, transport.rank, transport.size, model, optimizer)
            for name, given in (("model", model), ("optimizer", optimizer), ("hook", hook)):
                if given is not None and state[name] is None:
                    raise ConfigError(f"{name}: there is none in the checkpoint {os.fspath(folder)!r}")
            if optimizer is not None and state["kind"] != type(optimizer).__name__:
                raise ConfigError(
                    f"optimizer: the checkpoint is of {state['kind']}, this one is {type(optimizer).__name__}"
                )
        with agreement(transport) as claims:
            if model is not None:
                _bare(model).load_state_dict(state["model"])
            if optimizer is not None:
                optimizer.load_state_dict(state["optimizer"])
                step = optimizer.param_groups[0].get("decent_step")
                claims["step of the optimizer"] = f"{step} in {os.fspath(folder)!r}"
            if hook is not None:
                hook.load_state_dict(state["hook"])
    finally:
        transport.close()
    return state["extra"]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in this folder of checkpoints that was completed last; None if there is none.

    A save that was interrupted is passed over, so a restarted run finds the one before it.
    """
    complete: list[tuple[float, Path]] = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        try:
            ranks = saved_ranks(path)
        except ConfigError:
            continue
        complete.append((max((_part(path, rank, ranks) / ".metadata").stat().st_mtime for rank in range(ranks)), path))
    return max(complete)[1] if complete else None


def saved_ranks(folder: str | os.PathLike[str]) -> int:
    """How many ranks a checkpoint is of.

    Raises:
        ConfigError: there is none, or it is not complete.
    """
    path = Path(folder)
    found = [m for entry in (path.iterdir() if path.is_dir() else ()) if (m := _NAME.fullmatch(entry.name))]
    sizes = sorted({int(match[2]) for match in found})
    if not sizes:
        raise ConfigError(f"folder: no checkpoint in {os.fspath(folder)!r}")
    if len(sizes) > 1:
        raise ConfigError(f"folder: {os.fspath(folder)!r} has parts of {' and of '.join(map(str, sizes))} ranks")
    missing = [rank for rank in range(sizes[0]) if not (_part(path, rank, sizes[0]) / ".metadata").exists()]
    if missing:
        raise ConfigError(
            f"folder: the checkpoint {os.fspath(folder)!r} is not complete: ranks {missing} of {sizes[0]} are missing"
        )
    return sizes[0]


def read(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """One rank's part: "model", "optimizer", "hook", "extra" as they were given, and "kind" of the optimizer."""
    part = _part(folder, rank, ranks)
    try:
        metadata = dcp.FileSystemReader(part).read_metadata().state_dict_metadata
        entries: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
            for name, entry in metadata.items()
        }
        with _expected():
            dcp.load(entries, checkpoint_id=part, no_dist=True)
        rest = torch.load(io.BytesIO(entries[_REST].numpy().tobytes()), weights_only=True)
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        raise ConfigError(f"folder: {os.fspath(part)!r} cannot be read: {_reason(error)}") from error
    state: dict[str, Any] = _filled(rest, entries)
    return state


def _collect(
    folder: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    hook: HasState | None,
    extra: Any,
    process_group: dist.ProcessGroup | None,
) -> tuple[Path, dict[str, Tensor]]:
    """Where this rank's part goes, and its entries: all tensors, and everything else as bytes."""
    own = _part(Path(folder), *place(process_group))
    if (own / ".metadata").exists():
        raise ConfigError(f"folder: {os.fspath(own)!r} is there already; give every save a folder of its own")
    state = {
        "model": None if model is None else _bare(model).state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "kind": type(optimizer).__name__,
        "hook": None if hook is None else hook.state_dict(),
        "extra": extra,
    }
    entries: dict[str, Tensor] = {}
    buffer = io.BytesIO()
    torch.save(_emptied(state, "", entries), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise ConfigError(
            "extra: allowed are numbers, strings, None, tensors, and lists and dicts of these; "
            f"what was given cannot be loaded without running code: {str(error).splitlines()[0]}"
        ) from error
    entries[_REST] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return own, entries


def _write(own: Path, entries: dict[str, Tensor]) -> None:
    own.mkdir(parents=True, exist_ok=True)
    # The metadata are written last, under another name first: a part that has them is complete.
    with _expected():
        dcp.save(dict(entries), checkpoint_id=own, no_dist=True)


@contextmanager
def _expected() -> Iterator[None]:
    """Without a warning that this rank reads or writes alone: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        (error, _), *_ = error.failures.values()
    return f"{type(error).__name__} {error}".strip()


def _part(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"rank-{rank}-of-{ranks}"


def _bare(model: nn.Module) -> nn.Module:
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _emptied(value: Any, path: str, entries: dict[str, Tensor]) -> Any:
    """The same with a name in the place of each tensor, which is entered under that name."""
    if isinstance(value, Tensor):
        entries[path] = value.detach()
        return _TENSOR + path
    if isinstance(value, Mapping):
        return {key: _emptied(item, f"{path}/{key}", entries) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_emptied(item, f"{path}/{index}", entries) for index, item in enumerate(value)])
    return value


def _filled(value: Any, entries: Mapping[str, Tensor]) -> Any:
    if isinstance(value, str) and value.startswith(_TENSOR):
        return entries[value.removeprefix(_TENSOR)]
    if isinstance(value, dict):
        return {key: _filled(item, entries) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_filled(item, entries) for item in value])
    return value
