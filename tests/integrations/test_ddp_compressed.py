"""Compressed gradients on real DDP models and gloo ranks, against a plain simulation and against DDP itself."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_opt import ConfigError
from decent_opt.compression import Key, Layout, make_compressor
from decent_opt.errors import Disagreement
from decent_opt.integrations.ddp_compressed import CompressedState, compressed_hook
from decent_opt.monitoring import RoundRecord
from decent_opt.testing import RankFailed, RankPool, seeded
from tests.integrations.small_ddp import BUCKET, Net, batch, flat, net, sgd, train

LAWS = ["sign", "topk:share=0.1", "random-blocks", "int8", "identity"]


def wrap(model: nn.Module, spec: str, state: dict[str, Any] | None = None, **ddp: Any) -> Any:
    """A DDP model with the hook, and the hook's state."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": BUCKET, **ddp})
    options: dict[str, Any] = {"model": wrapped, **(state or {})}
    compressed = CompressedState(spec, **options)
    wrapped.register_comm_hook(compressed, compressed_hook)
    return wrapped, compressed


def distributed(rank: int, spec: str, state: dict[str, Any], ddp: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model, compressed = wrap(net(), spec, state, **ddp)
    train(model, sgd(model), rank, range(6))
    return flat(model), {name: e.clone() for name, e in compressed.state_dict().get("residuals", {}).items()}


def simulated(spec: str, n: int, error_feedback: bool) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The equations of the module's docstring, one process, one parameter at a time."""
    model, compressor = net(), make_compressor(spec)
    optimizer = sgd(model)
    parameters = dict(model.named_parameters())
    residuals = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(n)]
    for step in range(6):
        mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for rank in range(n):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            for index, (name, parameter) in enumerate(parameters.items()):
                key = Key(seed=7, round=step + 1, rank=rank, tensor=index)
                p = parameter.grad + residuals[rank][name] if error_feedback else parameter.grad
                q = compressor.decompress(compressor.compress(p, key), p.shape, p.dtype, key)
                if error_feedback:
                    q *= compressor.damping(Layout.of(p.shape))
                    residuals[rank][name] = p - q
                mean[name] += q / n
        for name, parameter in parameters.items():
            parameter.grad = mean[name]
        optimizer.step()
    return flat(model), residuals


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(("spec", "n"), [*((spec, 2) for spec in LAWS), ("sign", 3), ("random-blocks", 4)])
def test_equals_the_plain_simulation(ranks: RankPool, spec: str, n: int, error_feedback: bool) -> None:
    results = ranks.run(distributed, n, (spec, {"error_feedback": error_feedback, "seed": 7}, {}))
    expected, residuals = simulated(spec, n, error_feedback)
    for rank, (parameters, found) in enumerate(results):
        assert torch.equal(parameters, results[0][0])  # the ranks sum in one order, so they stay the same to the bit
        # float32: q is weighted by 1/n before the sum here and after it there
        assert torch.allclose(parameters, expected, rtol=1e-5, atol=1e-6)
        assert list(found) == (list(residuals[0]) if error_feedback else [])
        for name, residual in found.items():
            assert torch.allclose(residual, residuals[rank][name], rtol=1e-4, atol=1e-6)
    if error_feedback and spec != "identity":
        assert any(bool(residual.any()) for residual in results[0][1].values())


@pytest.mark.parametrize("spec", ["sign", "random-blocks"])
def test_buckets_and_their_rebuilding_change_nothing(ranks: RankPool, spec: str) -> None:
    # the first backward pass has one bucket of all, but several in another order with find_unused_parameters
    variants: list[dict[str, Any]] = [
        {},
        {"bucket_cap_mb": 100},
        {"bucket_cap_mb": BUCKET / 2, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ]
    runs = [ranks.run(distributed, 2, (spec, {}, ddp)) for ddp in variants]
    for (parameters, residuals), *others in zip(*runs, strict=True):
        for other, other_residuals in others:
            assert torch.equal(parameters, other)
            assert all(torch.equal(e, other_residuals[name]) for name, e in residuals.items())


def against_ddp(rank: int, variant: str) -> float:
    """Relative distance between plain DDP and the hook with the identity."""
    options: dict[str, Any] = {"find_unused_parameters": True} if variant == "unused" else {}
    options.update({"static_graph": True} if variant == "static" else {})
    models = [net(skip=variant == "unused") for _ in range(2)]
    pair = [DistributedDataParallel(models[0], **options), wrap(models[1], "identity", **options)[0]]
    for ddp in pair:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(3 if variant == "no_sync" else 1):
                with ddp.no_sync() if variant == "no_sync" and micro < 2 else contextlib.nullcontext():
                    ddp(batch(rank, 3 * step + micro)).square().mean().backward()
            optimizer.step()
    reference, ours = (flat(ddp) for ddp in pair)
    return float((ours - reference).norm() / reference.norm())


@pytest.mark.parametrize("variant", ["plain", "unused", "no_sync", "static"])
def test_identity_equals_ddp(ranks: RankPool, variant: str) -> None:
    # float32: DDP divides each gradient by n and then sums
    assert max(ranks.run(against_ddp, 3, (variant,))) <= 1e-6


def steps_counted(rank: int) -> tuple[int, int]:
    model, state = wrap(net(), "sign")
    for micro in range(9):
        with model.no_sync() if micro % 3 < 2 else contextlib.nullcontext():
            model(batch(rank, micro)).square().mean().backward()
    return state.step, len(state.monitor.records)


def test_steps_are_exchanged_backward_passes(ranks: RankPool) -> None:
    assert ranks.run(steps_counted, 2) == [(3, 3)] * 2


def uneven(rank: int) -> tuple[int, Tensor]:
    model, state = wrap(net(), "sign")
    with model.join():
        train(model, sgd(model), rank, range(3 + 2 * rank))
    return state.step, flat(model)


def test_a_worker_without_data_goes_on_exchanging_under_join(ranks: RankPool) -> None:
    results = ranks.run(uneven, 3)
    assert [step for step, _ in results] == [7, 7, 7]
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)


def resumed(rank: int, folder: str, spec: str) -> bool:
    straight, straight_state = wrap(net(), spec)
    train(straight, sgd(straight), rank, range(10))
    first, state = wrap(net(), spec)
    optimizer = sgd(first)
    train(first, optimizer, rank, range(5))
    file = Path(folder) / f"rank{rank}.pt"
    torch.save(
        {"model": first.module.state_dict(), "optimizer": optimizer.state_dict(), "hook": state.state_dict()}, file
    )
    second, state = wrap(Net(), spec)
    optimizer, saved = sgd(second), torch.load(file, weights_only=True)
    second.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["hook"])
    train(second, optimizer, rank, range(5, 10))
    before, after = straight_state.state_dict(), state.state_dict()
    same = all(torch.equal(e, after["residuals"][name]) for name, e in before["residuals"].items())
    return same and before["step"] == after["step"] == 10 and torch.equal(flat(straight), flat(second))


@pytest.mark.parametrize("spec", ["sign", "random-blocks"])
def test_resume_is_exact(ranks: RankPool, tmp_path: Path, spec: str) -> None:
    assert ranks.run(resumed, 3, (str(tmp_path), spec)) == [True] * 3


def refused_states(rank: int) -> list[str]:
    state = wrap(net(), "sign")[1]
    good, texts = state.state_dict(), []
    residuals = good["residuals"]
    extra, fewer = {**residuals, "other": torch.zeros(2)}, dict(list(residuals.items())[1:])
    shapes = {**residuals, "first.weight": torch.zeros(3)}
    for change in (
        *({"compressor": "Other()"}, {"rank": 5}, {"workers": 8}, {"error_feedback": False}, {"seed": 1}),
        *({"residuals": extra}, {"residuals": fewer}, {"residuals": shapes}),
    ):
        with pytest.raises(ConfigError) as error:
            state.load_state_dict({**good, "step": 3, **change})
        texts.append(str(error.value))
    assert state.step == 0
    with pytest.raises(ConfigError) as error:
        CompressedState("sign").state_dict()
    # without error feedback there is nothing that needs a name
    assert "residuals" not in CompressedState("int8", error_feedback=False).state_dict()
    return [*texts, str(error.value)]


def test_a_state_that_does_not_fit_is_refused(ranks: RankPool) -> None:
    texts = ranks.run(refused_states, 2)[0]
    fields = ("compressor", "rank", "workers", "error_feedback", "seed")
    for field, text in zip(fields, texts, strict=False):
        assert text.startswith(f"{field}: the saved state has ") and "begin with memories of zero" in text
    assert texts[5:] == [
        "residuals of other: the saved state has (2,), the model nothing",
        "residuals of first.weight: the saved state has nothing, the model (64, 6)",
        "residuals of first.weight: the saved state has (3,), the model (64, 6)",
        "model: residuals are saved by parameter name; use CompressedState(..., model=ddp_model)",
    ]


def overflow(rank: int, bad: float, spec: str) -> tuple[list[Tensor], list[float]]:
    """Step 2 overflows on rank 1, in one bucket. A scaler has to skip it on both, and go on."""
    model, state = wrap(net(), spec)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    seen, scales = [], []
    encode = state.compressor.encode

    def watched(x: Tensor, *rest: Any) -> None:
        assert bool(x.isfinite().all())  # a compressor need not know what to do with others
        encode(x, *rest)

    object.__setattr__(state.compressor, "encode", watched)
    for step in range(4):
        optimizer.zero_grad()
        before = {name: e.clone() for name, e in state.state_dict()["residuals"].items()}
        output = model(batch(rank, step))
        if rank == 1 and step == 2:
            model.module.last.bias.register_hook(lambda g: torch.full_like(g, bad))
        scaler.scale(output.square().mean()).backward()
        if step == 2:
            grads, after = model.module.last.bias.grad, state.state_dict()["residuals"]
            assert bool(grads.isnan().all()) and bool(model.module.first.weight.grad.isfinite().all())
            assert torch.equal(before["last.bias"], after["last.bias"])
            assert not torch.equal(before["first.weight"], after["first.weight"])
            model.module.last.bias._backward_hooks.clear() if rank == 1 else None
        scaler.step(optimizer)
        scaler.update()
        seen.append(flat(model))
        scales.append(scaler.get_scale())
    assert all(bool(e.isfinite().all()) for e in state.state_dict()["residuals"].values())
    return seen, scales


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("spec", ["sign", "topk:share=0.1", "int8"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_enters_no_residual(ranks: RankPool, bad: float, spec: str) -> None:
    (first, scales), (second, other_scales) = ranks.run(overflow, 2, (bad, spec))
    assert scales == other_scales == [8.0, 8.0, 4.0, 4.0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[1], first[2]) and bool(first[3].isfinite().all()) and not torch.equal(first[2], first[3])


def recorded(rank: int, spec: str) -> list[RoundRecord]:
    model, state = wrap(net(), spec, {"sinks": [(seen := []).append]})
    train(model, sgd(model), rank, range(3))
    assert seen == list(state.monitor.records) and state.monitor.totals["gradient"].exchanges == 3
    return seen


@pytest.mark.parametrize("spec", ["identity", "sign"])
def test_bytes_are_those_of_the_messages(ranks: RankPool, spec: str) -> None:
    shapes, compressor = [tuple(p.shape) for p in net().parameters()], make_compressor(spec)
    parts = sum(-(-compressor.nbytes(Layout.of(shape), torch.float32) // 8) * 8 for shape in shapes)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    for records in ranks.run(recorded, 3, (spec,)):
        assert [record.step for record in records] == [1, 2, 3] and {r.kind for r in records} == {"gradient"}
        for record in records:
            headers = sum(record.bytes_sent.values()) - 2 * parts
            assert headers in (2 * 8 * buckets for buckets in (1, 2, 3, 4))  # DDP makes new buckets after a step
            assert record.bytes_received == record.bytes_sent
            assert abs(record.allreduce_bytes - 2 * 2 / 3 * 4 * numel) < 100


def regression(rank: int, n: int) -> dict[str, float]:
    """Loss over the data of all workers after 250 steps; each worker's own optimum is another one."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(n, 64, 32, generator=generator), torch.randn(n, 32, 1, generator=generator)
    y = x @ (w + 1) + 0.1 * torch.randn(n, 64, 1, generator=generator)
    losses = {}
    for form in ("ddp", "sign", "sign, forgetful", "topk:share=0.1", "topk:share=0.1, forgetful"):
        with seeded(0):
            model = nn.Linear(32, 1)
        ddp = DistributedDataParallel(model)
        if form != "ddp":
            spec, _, forgetful = form.partition(", ")
            state = CompressedState(spec, error_feedback=not forgetful, model=ddp)
            ddp.register_comm_hook(state, compressed_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 250)
        for _ in range(250):
            optimizer.zero_grad()
            (ddp(x[rank]) - y[rank]).square().mean().backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            losses[form] = float((model(x) - y).square().mean())
    return losses


def test_error_feedback_reaches_the_loss_of_ddp_and_without_it_training_stalls(ranks: RankPool) -> None:
    losses = ranks.run(regression, 3, (3,))[0]
    print(losses)
    for spec in ("sign", "topk:share=0.1"):
        assert losses[spec] <= 1.001 * losses["ddp"]
        assert losses[f"{spec}, forgetful"] >= 1.05 * losses["ddp"]


def alone(rank: int) -> bool:
    pair = [DistributedDataParallel(net()), wrap(net(), "topk:share=0.1")[0]]
    for model in pair:
        train(model, sgd(model), rank, range(3))
    return torch.equal(flat(pair[0]), flat(pair[1]))


def test_one_worker_compresses_nothing(ranks: RankPool) -> None:
    assert ranks.run(alone, 1) == [True]


def sixteen_bits(rank: int, dtype: torch.dtype) -> Tensor:
    model, state = wrap(net().to(dtype), "sign")
    local = net().to(dtype)
    for network in (model, local):
        network(batch(rank, 0).to(dtype)).square().mean().backward()
    residuals = state.state_dict()["residuals"]
    for name, parameter in local.named_parameters():
        g = parameter.grad.float()
        expected = g - state.compressor.decompress(state.compressor.compress(g), g.shape, g.dtype)
        assert residuals[name].dtype == torch.float32
        assert float((residuals[name] - expected).norm()) <= 1e-5 * float(expected.norm())  # bfloat16 would give 1e-3
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_have_float32_residuals(ranks: RankPool, dtype: torch.dtype) -> None:
    first, second = ranks.run(sixteen_bits, 2, (dtype,))
    assert first.dtype == dtype and bool(first.any()) and torch.equal(first, second)


def channels_last(rank: int, memory_format: torch.memory_format) -> list[Tensor]:
    with seeded(0):
        model = nn.Conv2d(16, 32, 3).to(memory_format=memory_format)
    ddp, state = wrap(model, "identity")
    ddp(torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    state.state_dict()["residuals"]["weight"].copy_(model.weight.grad)  # as if this much had been held back
    ddp.zero_grad()
    ddp(torch.zeros(2, 16, 5, 5)).sum().backward()
    return [model.weight.grad.contiguous()]


def test_residuals_follow_the_memory_order_of_the_parameter(ranks: RankPool) -> None:
    (plain,), (last,) = (ranks.run(channels_last, 2, (f,))[0] for f in (torch.contiguous_format, torch.channels_last))
    assert bool(plain.any()) and torch.allclose(plain, last, rtol=1e-4, atol=1e-6)


def refusals(rank: int) -> list[str]:
    texts, other = [], net()
    for attempt in (
        lambda: CompressedState("sing"),
        lambda: CompressedState("identity", seed=rank),
        lambda: CompressedState("identity" if rank else "sign"),
        lambda: CompressedState("identity", model=DistributedDataParallel(net().to(torch.float64 if rank else None))),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        texts.append(str(error.value))
    for model, options in ((net(), {"model": other}), (nn.EmbeddingBag(5, 3, sparse=True), {})):
        ddp, _ = wrap(model, "identity", options)
        with pytest.raises((ConfigError, RuntimeError)) as error:
            ddp(torch.tensor([[1, 2]]) if isinstance(model, nn.EmbeddingBag) else batch(rank, 0)).sum().backward()
        texts.append(str(error.value))
    return texts


def test_refusals(ranks: RankPool) -> None:
    for unknown, seed, compressor, dtype, other, sparse in ranks.run(refusals, 2):
        assert unknown.startswith("compressor: allowed are identity") and "did you mean 'sign'" in unknown
        assert seed.startswith("seed: rank ") and "every rank needs the same" in seed
        assert compressor.startswith("compressor: rank ")
        assert dtype.startswith("parameter first.weight: rank ")
        assert "pass the DDP model that the hook is registered on" in other
        assert "build embeddings with sparse=False" in sparse


def out_of_step(rank: int) -> None:
    model, state = wrap(net(), "random-blocks")
    state.step = 5 * rank  # as if only rank 1 had loaded its state
    model(batch(rank, 0)).sum().backward()


def test_ranks_out_of_step_are_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailed) as error:
        ranks.run(out_of_step, 2)
    for rank, text in error.value.reports.items():
        assert f"{Disagreement.__name__}: step: rank {rank} is at {1 + 5 * rank}, others at [{6 - 5 * rank}]" in text


def warnings(rank: int) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("decent_opt.integrations")
    logger.addHandler(handler)
    try:
        for spec, error_feedback in (("sign", True), ("sign", False), ("int8", False), ("identity", False)):
            model, _ = wrap(net(), spec, {"error_feedback": error_feedback})
            train(model, sgd(model), rank, range(2))
    finally:
        logger.removeHandler(handler)
    return texts


def test_warns_of_what_is_lost_and_of_what_does_not_pay(ranks: RankPool) -> None:
    first, *others = ranks.run(warnings, 3)
    lost, dear = first
    assert lost.startswith("error_feedback: got False with Sign(") and "use error_feedback=True" in lost
    assert dear.startswith("compressed_hook sends ") and "Identity() does not pay with 3 workers" in dear
    assert others == [[], []]


def deserted(rank: int) -> None:
    model, _ = wrap(net(), "sign")
    for step in range(3):
        if rank == 1 and step == 2:
            os._exit(3)
        model(batch(rank, step)).sum().backward()


def test_a_lost_worker_raises_on_the_others(ranks: RankPool) -> None:
    # Callbacks are run after a failure, too: what is in the buffers then is no message.
    with pytest.raises(RankFailed) as error:
        ranks.run(deserted, 3)
    assert sorted(error.value.reports) == [0, 1, 2]
    for rank in (0, 2):
        assert "RuntimeError" in error.value.reports[rank] and "Disagreement" not in error.value.reports[rank]
