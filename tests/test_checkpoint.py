"""Save, forget everything, load, go on: the same bits on every rank as without a stop."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_opt import ConfigError, Decentralized, LocalAdamW, checkpoint
from decent_opt.errors import Disagreement
from decent_opt.integrations.ddp import decentralize
from decent_opt.integrations.ddp_blocks import BlockSparseState, block_sparse_hook
from decent_opt.integrations.ddp_compressed import CompressedState, compressed_hook
from decent_opt.sparsification import BlockMean
from decent_opt.testing import RankFailed, RankPool, run_ranks, seeded

COMPRESSORS = [
    "identity", "bf16", "fp16", "sign:chunk=16", "topk:share=0.2,block=16", "topk-global:share=0.2",
    "random-blocks:share=0.5,block=8", "randk:share=0.3", "int8", "int4", "int2",
]  # fmt: skip
SGD, ADAMW = partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)
CPD: dict[str, Any] = {"algorithm": "cpd", "gamma": 0.3}
RUNS: dict[str, dict[str, Any]] = {
    "pd": {},
    "pd one peer": {"topology": "one-peer-exponential"},
    "pd overlap": {"overlap_steps": 2},
    "pd outer": {"outer_momentum": 0.5, "global_every": 2},
    "pd outer overlap": {"outer_momentum": 0.5, "overlap_steps": 1, "base": ADAMW},
    "pd bfloat16": {"dtype": torch.bfloat16, "outer_momentum": 0.3},
    "pd bfloat16 overlap": {"dtype": torch.bfloat16, "overlap_steps": 3, "message_dtype": "bfloat16"},
    "pd momentum": {"momentum_sync": "average"},
    "warm-up": {"warmup_steps": 9, "base": ADAMW},
    "local adamw": {"base": "local", "warmup_steps": 2},
    "local adamw cpd": {"base": "local", "warmup_steps": 2, **CPD},
    "cpd bfloat16": {"dtype": torch.bfloat16, **CPD},
    "cpd outer": {"outer_momentum": 0.3, "base": ADAMW, **CPD},
    "cpd auto": {**CPD, "gamma": "auto", "period": 1},
    **{
        f"cpd {order} {spec}": {**CPD, "order": order, "compressor": spec}
        for spec in COMPRESSORS
        for order in ("paper", "fresh")
    },
}
HALF = (6, 7, 8)  # period 3, first round after step 3: cut at a round, and one and two steps behind it


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


class Run:
    """A model and its optimizer, or a DDP model with one of our hooks."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        options = {"period": 3, **options}
        self.rank, self.hook = rank, None
        self.model = net(options.pop("dtype", torch.float32))
        base, hook = options.pop("base", SGD), options.pop("hook", None)
        if hook is not None:
            self.model = DistributedDataParallel(self.model)
            self.hook = hook[0](model=self.model, **hook[2])
            self.model.register_comm_hook(self.hook, hook[1])
            self.optimizer: Any = base(self.model.parameters())
        elif base == "local":
            self.optimizer = LocalAdamW(self.model.parameters(), lr=0.01, model=self.model, **options)
        else:
            self.optimizer = Decentralized(base(self.model.parameters()), model=self.model, **options)

    def go(self, first: int, last: int) -> None:
        dtype = next(self.model.parameters()).dtype
        for step in range(first, last):
            data = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + self.rank)).to(dtype)
            self.optimizer.zero_grad()
            self.model(data).square().mean().backward()
            self.optimizer.step()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "hook": self.hook}

    def everything(self) -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"{index} {key}": torch.as_tensor(value).clone() for key, value in entries.items()}
        for kind, tensors in ({} if self.hook is None else self.hook.state_dict()).items():
            if isinstance(tensors, dict):
                found |= {f"{kind} {name}": tensor.clone() for name, tensor in tensors.items()}
        return found


def straight(rank: int, options: dict[str, Any], stop: int, end: int) -> dict[str, Tensor]:
    run = Run(rank, options)
    run.go(0, end)
    return run.everything()


def saved(rank: int, options: dict[str, Any], folder: str, stop: int) -> dict[str, Tensor]:
    run = Run(rank, options)
    run.go(0, stop)
    writing = checkpoint.async_save(folder, **run.parts, extra={"rank": rank, "own": torch.full((2,), rank)})
    before = run.everything()
    run.go(stop, stop + 2)  # what is written must not follow
    writing.result()
    return before


def resumed(rank: int, options: dict[str, Any], folder: str, stop: int, end: int) -> dict[str, Tensor]:
    run = Run(rank, options)
    extra = checkpoint.load(folder, **{name: part for name, part in run.parts.items() if part is not None})
    assert extra["rank"] == rank and extra["own"].tolist() == [rank, rank]
    run.go(stop, end)
    return run.everything()


def assert_same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for rank, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.keys() == b.keys()
        differing = [name for name in a if not torch.equal(a[name], b[name])]
        assert not differing, f"rank {rank}: {differing}"


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact_on_virtual_ranks(name: str, tmp_path: Path) -> None:
    options = RUNS[name]
    for stop in HALF:
        folder, end = str(tmp_path / str(stop)), 2 * stop
        whole = run_ranks(straight, 3, "loopback", (options, stop, end))
        run_ranks(saved, 3, "loopback", (options, folder, stop))
        assert_same(whole, run_ranks(resumed, 3, "loopback", (options, folder, stop, end)))
    assert not torch.equal(whole[0]["0.weight"], whole[1]["0.weight"]) or "topology" in options


BLOCKS: dict[str, Any] = {"tau": 0.25, "block": 8}
ON_GLOO: list[dict[str, Any]] = [
    {"hook": (BlockSparseState, block_sparse_hook, {"estimator": "unbiased", **BLOCKS})},
    {"hook": (BlockSparseState, block_sparse_hook, {"estimator": "error_feedback", **BLOCKS}), "base": ADAMW},
    {"hook": (BlockSparseState, block_sparse_hook, {"estimator": "control_variate", **BLOCKS, "warmup_steps": 2})},
    {"hook": (CompressedState, compressed_hook, {"compressor": "sign"})},
    {"hook": (CompressedState, compressed_hook, {"compressor": "topk:share=0.2"})},
    *(RUNS[name] for name in ("pd", "pd outer overlap", "pd bfloat16 overlap", "local adamw cpd", "cpd bfloat16")),
    *(RUNS[name] for name in ("cpd paper sign:chunk=16", "cpd fresh randk:share=0.3", "cpd auto")),
]


def on_gloo(rank: int, folder: str, stop: int) -> None:
    """A dozen runs, one after the other, each with everything built anew after the stop."""
    for number, options in enumerate(ON_GLOO):
        whole = straight(rank, options, stop, 2 * stop)
        saved(rank, options, f"{folder}/{number}", stop)
        assert_same([whole], [resumed(rank, options, f"{folder}/{number}", stop, 2 * stop)])


def test_resume_is_exact_on_real_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(on_gloo, 4, (str(tmp_path), 7), timeout=100)


def test_resume_is_exact_in_new_processes(tmp_path: Path) -> None:
    options, folder = RUNS["cpd outer"], str(tmp_path / "run")
    whole = run_ranks(straight, 2, "gloo", (options, 7, 14))
    run_ranks(saved, 2, "gloo", (options, folder, 7))
    assert_same(whole, run_ranks(resumed, 2, "gloo", (options, folder, 7, 14)))


def own_estimates(rank: int, folder: str, estimator: Any) -> bool:
    def gradient(step: int) -> Tensor:
        return torch.randn(50, generator=torch.Generator().manual_seed(10 * step + rank))

    straight, first, second = (BlockMean(50, 0.3, estimator=estimator, block=4) for _ in range(3))
    whole = [straight.mean_(gradient(step)) for step in range(6)]
    for step in range(3):
        first.mean_(gradient(step))
    checkpoint.save(folder, hook=first)
    checkpoint.load(folder, hook=second)
    return all(torch.equal(second.mean_(gradient(step)), whole[step]) for step in range(3, 6))


@pytest.mark.parametrize("estimator", ["unbiased", "error_feedback", "control_variate"])
def test_estimators_resume_exactly(estimator: str, tmp_path: Path) -> None:
    assert all(run_ranks(own_estimates, 3, "loopback", (str(tmp_path), estimator)))


# -- another number of workers ---------------------------------------------------------------------------------------


def true_values(run: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters with their remainders, in float64; parameters stand in the order of the optimizer's indices."""
    names = [name for name, _ in net().named_parameters()]
    zero = torch.zeros(())
    return {n: run[n].double() + run.get(f"{i} decent_remainder", zero).double() for i, n in enumerate(names)}


def loaded(rank: int, options: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    run = Run(rank, options)
    checkpoint.load(folder, **{name: part for name, part in run.parts.items() if part is not None})
    at_once = run.everything()
    run.go(20, 30)
    kinds = [] if run.hook is not None else [record.kind for record in run.optimizer.monitor.records]
    return at_once, run.everything(), kinds


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3), (3, 1)])
@pytest.mark.parametrize("name", ["pd outer overlap", "cpd bfloat16", "cpd outer", "local adamw"])
def test_another_number_of_workers_starts_from_the_mean(
    old: int, new: int, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, folder = RUNS[name], str(tmp_path / "run")
    before = run_ranks(saved, old, "loopback", (options, folder, 7))
    with caplog.at_level(logging.WARNING):
        after = run_ranks(loaded, new, "loopback", (options, folder))
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("resumed with")]
    assert line.startswith(f"resumed with {new} workers what {old} have saved: ")
    first = after[0][0]
    assert_same([first] * new, [at_once for at_once, _, _ in after])
    for name_, value in true_values(first).items():
        mean = sum(true_values(run)[name_] for run in before) / old
        assert torch.allclose(value, mean, rtol=1e-6, atol=1e-7)  # sums of float32
    for key in first.keys() & {"0 momentum_buffer", "0 exp_avg", "0 exp_avg_sq", "0 decent_outer_momentum"}:
        mean = sum(run[key].double() for run in before) / old
        assert torch.allclose(first[key].double(), mean, rtol=2**-7 if "bfloat16" in name else 1e-5, atol=1e-7)
    assert not any(key.endswith(("public_copy", "pull", "correction")) for key in first)
    for _, later, kinds in after:
        assert all(bool(value.isfinite().all()) for value in later.values() if value.is_floating_point())
        if "cpd" in name and new > 1:
            assert kinds[0] == "average" and "gossip" in kinds  # copies begin at the first round, from an exact average


def residuals(rank: int, folder: str, how: str) -> dict[str, Tensor]:
    hook = ON_GLOO[1] if how == "blocks" else ON_GLOO[3]
    run = Run(rank, hook)
    if Path(folder).exists():
        checkpoint.load(folder, **run.parts)
    else:
        run.go(0, 3)
        torch.distributed.barrier()  # all have seen that the folder is not there
        checkpoint.save(folder, **run.parts)
    return run.everything()


@pytest.mark.parametrize("how", ["blocks", "compressed"])
def test_what_the_mean_gradient_is_still_owed_is_kept(ranks: RankPool, how: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    old, new = ranks.run(residuals, 4, (folder, how)), ranks.run(residuals, 2, (folder, how))
    keys = [key for key in old[0] if key.startswith("residuals")]
    assert len(keys) == 6
    for key in keys:
        owed = sum(run[key] for run in old) / 4
        assert float(owed.norm()) > 0
        assert torch.allclose(sum(run[key] for run in new) / 2, owed, atol=1e-7)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def refused(rank: int, folder: str, options: dict[str, Any]) -> None:
    run = Run(rank, options)
    checkpoint.load(folder, model=run.model, optimizer=run.optimizer)


def written(rank: int, folder: str, stop: int) -> None:
    run = Run(rank, {})
    run.go(0, stop)
    checkpoint.save(folder, model=run.model, optimizer=run.optimizer)


def test_every_rank_says_what_is_wrong_with_a_checkpoint(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_ranks(written, 2, "loopback", (str(whole), 4))

    def texts(folder: Path, options: dict[str, Any] | None = None, n: int = 2) -> list[str]:
        with pytest.raises(RankFailed) as error:
            run_ranks(refused, n, "loopback", (str(folder), options or {}), timeout=20)
        assert sorted(error.value.reports) == list(range(n))
        return [error.value.reports[rank].strip().splitlines()[-1] for rank in range(n)]

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    assert all("folder: no checkpoint in" in text for text in texts(tmp_path / "nowhere"))
    incomplete = damaged("incomplete")
    (incomplete / "rank-1-of-2" / ".metadata").unlink()
    assert all("is not complete: ranks [1] of 2 are missing" in text for text in texts(incomplete))
    assert all("is not complete" in text for text in texts(incomplete, n=3))
    mixed = damaged("mixed")
    shutil.copytree(whole / "rank-0-of-2", mixed / "rank-0-of-3")
    assert all("has parts of 2 and of 3 ranks" in text for text in texts(mixed))
    short = damaged("short")
    data = next((short / "rank-1-of-2").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    one, other = texts(short)
    assert "rank 1 refused" in one and "cannot be read" in one and "cannot be read" in other
    torn = damaged("torn")  # ranks of two saves
    shutil.rmtree(torn / "rank-1-of-2")
    later = tmp_path / "later"
    run_ranks(written, 2, "loopback", (str(later), 5))
    shutil.copytree(later / "rank-1-of-2", torn / "rank-1-of-2")
    assert all(Disagreement.__name__ in text and "step of the optimizer" in text for text in texts(torn))
    local = texts(whole, {"base": "local", "warmup_steps": 2})
    assert all("optimizer: the checkpoint is of Decentralized, this one is LocalAdamW" in text for text in local)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^extra: allowed are numbers, strings, None, tensors"):
        checkpoint.save(tmp_path / "a", extra={"logger": logging.Formatter()})
    assert not (tmp_path / "a").exists()
    checkpoint.save(tmp_path / "b", extra={"text": "tensor:0", "pair": (1, [torch.ones(2), None])})
    extra = checkpoint.load(tmp_path / "b")
    assert extra["text"] == "tensor:0" and extra["pair"][0] == 1 and extra["pair"][1][0].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="give every save a folder of its own"):
        checkpoint.save(tmp_path / "b", extra={})
    with pytest.raises(ConfigError, match="model: there is none in the checkpoint"):
        checkpoint.load(tmp_path / "b", model=net())


def alone(rank: int, folder: str) -> bool:
    """Rank 0 saves while the others go on; what it saved is what it was."""
    model = DistributedDataParallel(net())
    optimizer = decentralize(model, SGD(model.parameters()), period=3, topology="ring", overlap_steps=2)
    run = Run.__new__(Run)
    run.rank, run.hook, run.model, run.optimizer = rank, None, model, optimizer
    run.go(0, 7)
    if rank == 0:
        checkpoint.save(folder, **run.parts)
    run.go(7, 12)
    return Path(folder, "rank-0-of-3", ".metadata").exists() or rank > 0


def test_one_rank_may_save_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert all(ranks.run(alone, 3, (str(tmp_path),)))
