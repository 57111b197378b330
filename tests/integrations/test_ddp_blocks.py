"""m/n blocks on real DDP models and gloo ranks, against a plain simulation and against DDP itself."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_opt import ConfigError
from decent_opt.errors import Disagreement
from decent_opt.integrations.ddp_blocks import BlockSparseState, block_sparse_hook
from decent_opt.monitoring import RoundRecord
from decent_opt.sparsification import BlockSampler
from decent_opt.testing import RankFailed, RankPool, seeded
from tests.integrations.small_ddp import BUCKET, Net, batch, flat, net, sgd, train

ESTIMATORS = ["unbiased", "error_feedback", "control_variate"]
MEMORIES = {
    "unbiased": [],
    "error_feedback": ["residuals"],
    "control_variate": ["control_variates", "mean_control_variates"],
}
STEPS = 5


def wrap(model: nn.Module, options: dict[str, Any], **ddp: Any) -> tuple[Any, BlockSparseState]:
    """A DDP model with the hook, and the hook's state."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": BUCKET, **ddp})
    state = BlockSparseState(**{"model": wrapped, **options})
    wrapped.register_comm_hook(state, block_sparse_hook)
    return wrapped, state


def pairs(parameters: Any) -> list[int]:
    """A partition: blocks of two parameters, the last perhaps of one."""
    sizes = [p.numel() for p in parameters]
    return [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]


Orders = list[list[list[str]]]  # step -> bucket -> names


def distributed(
    rank: int, options: dict[str, Any], ddp: dict[str, Any]
) -> tuple[Tensor, dict[str, dict[str, Tensor]], Orders]:
    wrapped = DistributedDataParallel(net(), **{"bucket_cap_mb": BUCKET, **ddp})
    names = {p: name for name, p in wrapped.module.named_parameters()}
    state = BlockSparseState(**{"model": wrapped, **options})
    orders: Orders = []

    def watched(state: BlockSparseState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            orders.append([])
        orders[-1].append([names[p] for p in bucket.parameters()])
        return block_sparse_hook(state, bucket)

    watched.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    wrapped.register_comm_hook(state, watched)
    train(wrapped, sgd(wrapped), rank, range(STEPS))
    saved = state.state_dict()
    memories = {kind: {name: m.clone() for name, m in saved[kind].items()} for kind in MEMORIES[state.estimator_name]}
    return flat(wrapped), memories, orders


def simulated(options: dict[str, Any], n: int, orders: Orders) -> tuple[Tensor, list[dict[str, dict[str, Tensor]]]]:
    """The equations, one process, float64 between the gradients: each bucket is one vector."""
    model = net()
    optimizer, parameters = sgd(model), dict(model.named_parameters())
    index = {name: place for place, name in enumerate(parameters)}
    estimator, block = options["estimator"], options.get("block", 1024)
    zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    kinds = MEMORIES[estimator]
    memory = [{kind: {name: z.clone() for name, z in zeros.items()} for kind in kinds} for _ in range(n)]
    for step in range(STEPS):
        gradients = []
        for rank in range(n):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            gradients.append({name: p.grad.double() for name, p in parameters.items()})
        for names in orders[step]:
            held = [parameters[name] for name in names]
            lengths = {"tensor": [p.numel() for p in held], "pairs": pairs(held)}
            sampler = BlockSampler.over(
                sum(p.numel() for p in held),
                options["tau"],
                block=lengths.get(block, block),
                masks=options.get("masks", "independent"),
                seed=7,
                tensor=index[names[0]],
            )
            cut = sampler.blocks
            edges = [0, *torch.tensor(lengths[block]).cumsum(0).tolist()] if block in lengths else None
            m, k = cut.count, sampler.kept
            total = torch.zeros(sum(p.numel() for p in held), dtype=torch.float64)
            for rank in range(n):
                mask = torch.zeros_like(total)
                for b in sampler.chosen(step + 1, rank).tolist():
                    begin, end = (edges[b], edges[b + 1]) if edges else (b * cut.length, (b + 1) * cut.length)
                    mask[begin:end] = 1
                g = torch.cat([gradients[rank][name].reshape(-1) for name in names])
                old = [torch.cat([memory[rank][kind][name].reshape(-1) for name in names]) for kind in kinds]
                v = {"unbiased": g, "error_feedback": g + sum(old), "control_variate": g - (old or [0])[0]}[estimator]
                q = mask * v
                if options.get("value_dtype"):
                    q = q.float().bfloat16().double()
                total += q
                new = {"error_feedback": [v - q], "control_variate": [old[0] + q, None] if old[1:] else []}
                for kind, values in zip(kinds, new.get(estimator, []), strict=True):
                    if values is not None:
                        put(memory[rank][kind], names, values)
            gradient = total * (m / k / n if estimator != "error_feedback" else 1 / n)
            if estimator == "control_variate":
                mean = torch.cat([memory[0][kinds[1]][name].reshape(-1) for name in names])
                gradient += mean
                for rank in range(n):
                    put(memory[rank][kinds[1]], names, mean + total / n)
            mine = {name: torch.zeros_like(p) for name, p in parameters.items()}
            put(mine, names, gradient)
            for name in names:
                parameters[name].grad = mine[name]
        optimizer.step()
    return flat(model), memory


def put(tensors: dict[str, Tensor], names: list[str], values: Tensor) -> None:
    for name, piece in zip(names, values.split([tensors[name].numel() for name in names]), strict=True):
        tensors[name].copy_(piece.view_as(tensors[name]))


CASES: list[tuple[int, dict[str, Any]]] = [
    *((2, {"estimator": e, "aggregation": a}) for e in ESTIMATORS for a in ("gather", "server")),
    *((4, {"estimator": e, "masks": "permutation"}) for e in ESTIMATORS),
    (4, {"estimator": "error_feedback", "masks": "shared", "aggregation": "server"}),
    (8, {"estimator": "unbiased", "tau": 1 / 8}),
    (8, {"estimator": "control_variate", "tau": 1 / 8, "aggregation": "server"}),
    (3, {"estimator": "error_feedback", "block": "tensor"}),
    (3, {"estimator": "unbiased", "block": pairs, "aggregation": "server"}),
    (3, {"estimator": "control_variate", "block": 7}),
    (2, {"estimator": "error_feedback", "value_dtype": torch.bfloat16}),
    (3, {"estimator": "control_variate", "value_dtype": torch.bfloat16, "aggregation": "server"}),
]


@pytest.mark.parametrize(("n", "options"), CASES)
def test_equals_the_plain_simulation(ranks: RankPool, n: int, options: dict[str, Any]) -> None:
    options = {"tau": 0.3, "seed": 7, **options}
    results = ranks.run(distributed, n, (options, {}))
    plain = {**options, "block": "pairs"} if options.get("block") is pairs else options
    expected, memories = simulated(plain, n, results[0][2])
    for rank, (parameters, found, orders) in enumerate(results):
        assert torch.equal(parameters, results[0][0])  # all ranks add in one order, so they stay the same to the bit
        assert orders == results[0][2] and len({len(buckets) for buckets in orders}) == 2  # buckets were rebuilt
        # float32; and a value on the edge of two bfloat16 may be rounded to either
        tolerance = 1e-2 if options.get("value_dtype") else 1e-5
        assert torch.allclose(parameters, expected, rtol=tolerance, atol=tolerance / 10)
        assert list(found) == MEMORIES[options["estimator"]]
        for kind, tensors in found.items():
            for name, tensor in tensors.items():
                assert torch.allclose(tensor.double(), memories[rank][kind][name], rtol=1e-4, atol=tolerance / 10)
            assert any(bool(tensor.any()) for tensor in tensors.values())


def draws(rank: int, options: dict[str, Any], count: int, bucket_cap_mb: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the hook's gradient over many draws, and this worker's own gradient."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    own = copy.deepcopy(model)
    own(batch(rank, 0)).square().sum().backward()
    ddp, _ = wrap(model, options, bucket_cap_mb=bucket_cap_mb)
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    squares = torch.zeros_like(total)
    for _ in range(count):
        ddp.zero_grad()
        ddp(batch(rank, 0)).square().sum().backward()
        g = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
        total += g
        squares += g.square()
    mean = total / count
    return mean, squares / count - mean.square(), torch.cat([p.grad.reshape(-1) for p in own.parameters()]).double()


@pytest.mark.parametrize(
    ("options", "bucket_cap_mb", "count"),
    [
        # tau = 1/n, independent; a bucket per tensor, or one for all: either is smaller than a block of 1024
        ({}, 1e-6, 4000),
        ({}, 25, 1000),
        ({"masks": "permutation", "aggregation": "server", "tau": 0.3}, 25, 1000),
        ({"block": "tensor", "tau": 0.5}, 25, 1000),
    ],
)
def test_the_mean_over_draws_is_the_mean_gradient(
    ranks: RankPool, options: dict[str, Any], bucket_cap_mb: float, count: int
) -> None:
    results = ranks.run(draws, 2, (options, count, bucket_cap_mb))
    truth = sum(own for _, _, own in results) / 2
    mean, variance, _ = results[0]
    # Each coordinate belongs to one block, and a block is chosen or not as a whole. About 50 of them, so that 3
    # standard errors are passed by one or two in eight such tests; by all of them together never.
    error = (mean - truth).abs() / (variance / count).sqrt().clamp_min(1e-12)
    off = float((truth.abs() > 0).double().mul(error > 3).sum())
    assert off <= 2 and float(error[truth != 0].max()) < 4.5
    assert float(variance.max()) > 0


def against_ddp(rank: int, variant: str, options: dict[str, Any]) -> float:
    """Relative distance between plain DDP and the hook."""
    ddp_options: dict[str, Any] = {"find_unused_parameters": True} if variant == "unused" else {}
    ddp_options.update({"static_graph": True} if variant == "static" else {})
    models = [net(skip=variant == "unused") for _ in range(2)]
    pair = [DistributedDataParallel(models[0], **ddp_options), wrap(models[1], options, **ddp_options)[0]]
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
@pytest.mark.parametrize("options", [{"estimator": e, "aggregation": a} for e, a in zip(
    ESTIMATORS, ("gather", "server", "gather"), strict=True
)])  # fmt: skip
def test_all_blocks_are_an_all_reduce(ranks: RankPool, variant: str, options: dict[str, Any]) -> None:
    # float32: DDP divides each gradient by n and then sums; a control variate subtracts and adds again
    assert max(ranks.run(against_ddp, 3, (variant, {"tau": 1.0, **options}))) <= 1e-6


def warmed_up(rank: int) -> tuple[Tensor, Tensor, list[int]]:
    plain = DistributedDataParallel(net(), bucket_cap_mb=BUCKET)
    ours, state = wrap(net(), {"estimator": "error_feedback", "warmup_steps": 2})
    for model in (plain, ours):
        train(model, sgd(model), rank, range(2))
    equal = flat(plain), flat(ours)
    train(ours, sgd(ours), rank, range(2, 4))
    return *equal, [sum(record.bytes_sent.values()) for record in state.monitor.records]


def test_the_warm_up_is_ddp(ranks: RankPool) -> None:
    for plain, ours, sent in ranks.run(warmed_up, 4):
        assert torch.equal(plain, ours)
        dense = 2 * 3 / 4 * 4 * len(plain)
        assert sent[:2] == [dense, dense]
        assert sent[2] == sent[3] < 0.6 * dense  # 3 quarters of the gradient to gather, and what is filled up


def in_sixteen_bits(rank: int, estimator: str) -> tuple[Tensor, Tensor, bool]:
    """bfloat16 parameters: all blocks next to DDP, and a share of them for a while."""
    plain = DistributedDataParallel(net().bfloat16())
    ours, _ = wrap(net().bfloat16(), {"tau": 1.0, "estimator": estimator})
    some, state = wrap(net().bfloat16(), {"tau": 0.25, "estimator": estimator, "block": 16})
    for model in (plain, ours, some):
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step).bfloat16()).square().mean().backward()
            optimizer.step()
    wide = all(m.dtype == torch.float32 for p in some.parameters() for m in state.memory_of(p).values())
    return flat(plain).float(), flat(ours).float(), wide and bool(flat(some).isfinite().all())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sixteen_bit_parameters_are_summed_in_float32(ranks: RankPool, estimator: str) -> None:
    for plain, ours, fine in ranks.run(in_sixteen_bits, 3, (estimator,)):
        assert fine
        # DDP rounds each summand to 8 bits, this hook the sum: a few units of 2^-9 of the gradients in four steps
        assert float((plain - ours).norm() / plain.norm()) < 4 * 2**-9


def steps_counted(rank: int) -> tuple[int, int]:
    model, state = wrap(net(), {})
    for micro in range(9):
        with model.no_sync() if micro % 3 < 2 else contextlib.nullcontext():
            model(batch(rank, micro)).square().mean().backward()
    return state.step, len(state.monitor.records)


def test_steps_are_exchanged_backward_passes(ranks: RankPool) -> None:
    assert ranks.run(steps_counted, 2) == [(3, 3)] * 2


def resumed(rank: int, folder: str, options: dict[str, Any]) -> bool:
    straight, straight_state = wrap(net(), options)
    train(straight, sgd(straight), rank, range(10))
    first, state = wrap(net(), options)
    optimizer = sgd(first)
    train(first, optimizer, rank, range(5))
    file = Path(folder) / f"rank{rank}.pt"
    torch.save(
        {"model": first.module.state_dict(), "optimizer": optimizer.state_dict(), "hook": state.state_dict()}, file
    )
    second, state = wrap(Net(), options)
    # New buckets come after the first backward pass only: have it behind us, as the straight run has.
    second(batch(rank, 0)).sum().backward()
    optimizer, saved = sgd(second), torch.load(file, weights_only=True)
    second.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["hook"])
    train(second, optimizer, rank, range(5, 10))
    before, after = straight_state.state_dict(), state.state_dict()
    same = all(
        torch.equal(e, after[kind][name])
        for kind in MEMORIES[state.estimator_name]
        for name, e in before[kind].items()
    )  # fmt: skip
    return same and before["step"] == after["step"] == 10 and torch.equal(flat(straight), flat(second))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_resume_is_exact(ranks: RankPool, tmp_path: Path, estimator: str) -> None:
    assert ranks.run(resumed, 3, (str(tmp_path), {"estimator": estimator})) == [True] * 3


def copied(rank: int, how: str, options: dict[str, Any]) -> tuple[bool, str]:
    """Half of a training with one state, half with a copy of it on another DDP model."""
    straight, _ = wrap(net(), options)
    optimizer = sgd(straight)
    train(straight, optimizer, rank, range(8))
    first, state = wrap(net(), options)
    optimizer = sgd(first)
    train(first, optimizer, rank, range(4))
    clone = copy.deepcopy(state) if how == "deepcopy" else pickle.loads(pickle.dumps(state))
    second = DistributedDataParallel(first.module, bucket_cap_mb=BUCKET)
    second.register_comm_hook(clone, block_sparse_hook)
    with pytest.raises(ConfigError) as error:
        second(batch(rank, 0)).sum().backward()
    # A failed backward pass leaves a DDP model unusable; and the new one's first buckets are others, see `resumed`.
    second = DistributedDataParallel(first.module, bucket_cap_mb=BUCKET)
    second(batch(rank, 0)).sum().backward()
    clone.bind(second)
    second.register_comm_hook(clone, block_sparse_hook)
    train(second, optimizer, rank, range(4, 8))
    return torch.equal(flat(straight), flat(second)), str(error.value)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "options", [{"estimator": "control_variate", "aggregation": "server"}, {"estimator": "error_feedback"}]
)
def test_a_copy_goes_on_where_the_original_was(ranks: RankPool, how: str, options: dict[str, Any]) -> None:
    for same, complaint in ranks.run(copied, 2, (how, options)):
        assert same and complaint == "BlockSparseState: this is a copy; call bind(ddp_model) before it is used"


def overflow(rank: int, bad: float, options: dict[str, Any]) -> tuple[list[Tensor], list[float]]:
    """Step 2 overflows on rank 1, in one bucket. A scaler has to skip it on both, and go on."""
    model, state = wrap(net(), options)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    seen, scales = [], []
    kinds = MEMORIES[options["estimator"]]

    def memories(name: str) -> list[Tensor]:
        saved = state.state_dict()
        return [saved[kind][name].clone() for kind in kinds]

    for step in range(4):
        optimizer.zero_grad()
        before = {name: memories(name) for name in ("last.bias", "first.weight")}
        output = model(batch(rank, step))
        if rank == 1 and step == 2:
            model.module.last.bias.register_hook(lambda g: torch.full_like(g, bad))
        scaler.scale(output.square().mean()).backward()
        if step == 2:
            grads = model.module.last.bias.grad, model.module.first.weight.grad
            assert not bool(grads[0].isfinite().all()) and bool(grads[1].isfinite().all())
            assert all(map(torch.equal, before["last.bias"], memories("last.bias")))
            assert not any(map(torch.equal, before["first.weight"], memories("first.weight")))
            model.module.last.bias._backward_hooks.clear() if rank == 1 else None
        scaler.step(optimizer)
        scaler.update()
        seen.append(flat(model))
        scales.append(scaler.get_scale())
    saved = state.state_dict()
    assert all(bool(e.isfinite().all()) for kind in kinds for e in saved[kind].values())
    return seen, scales


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("estimator", ["error_feedback", "control_variate"])
@pytest.mark.parametrize("aggregation", ["gather", "server"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_enters_no_memory(
    ranks: RankPool, bad: float, estimator: str, aggregation: str
) -> None:
    options = {"estimator": estimator, "aggregation": aggregation, "tau": 0.5, "block": 16}
    (first, scales), (second, other_scales) = ranks.run(overflow, 2, (bad, options))
    assert scales == other_scales == [8.0, 8.0, 4.0, 4.0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[1], first[2]) and bool(first[3].isfinite().all()) and not torch.equal(first[2], first[3])


def recorded(rank: int, options: dict[str, Any]) -> tuple[list[RoundRecord], list[list[int]]]:
    sizes: list[list[int]] = []
    wrapped = DistributedDataParallel(net(), bucket_cap_mb=BUCKET)
    state = BlockSparseState(**{"model": wrapped, "sinks": [(seen := []).append], **options})

    def watched(state: BlockSparseState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            sizes.append([])
        sizes[-1].append(bucket.buffer().numel())
        return block_sparse_hook(state, bucket)

    watched.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    wrapped.register_comm_hook(state, watched)
    train(wrapped, sgd(wrapped), rank, range(3))
    return seen, sizes


@pytest.mark.parametrize("aggregation", ["gather", "server"])
@pytest.mark.parametrize(("dtype", "itemsize"), [(None, 4), (torch.bfloat16, 2)])
def test_bytes_are_those_of_the_chosen_blocks(
    ranks: RankPool, aggregation: str, dtype: torch.dtype | None, itemsize: int
) -> None:
    n, tau, block = 4, 0.25, 16
    options = {"tau": tau, "block": block, "aggregation": aggregation, "value_dtype": dtype}
    for rank, (records, sizes) in enumerate(ranks.run(recorded, n, (options,))):
        assert [record.step for record in records] == [1, 2, 3] and {r.kind for r in records} == {"gradient"}
        for record, buckets in zip(records, sizes, strict=True):
            contribution = answer = 0
            for numel in buckets:
                length = min(block, numel // 16)  # 16 = 4 / tau blocks at least
                m = -(-numel // length)
                k = round(tau * m)
                contribution += 8 + -(-k * length * itemsize // 8) * 8  # a header of 8; no index; filled up to 8
                answer += 8 + 4 * numel
            (sent,), (received,) = record.bytes_sent.values(), record.bytes_received.values()
            if aggregation == "gather":
                assert sent == received == (n - 1) * contribution
            elif rank == 0:
                assert (sent, received) == ((n - 1) * answer, (n - 1) * contribution)
            else:
                assert (sent, received) == (contribution, answer)


def refusals(rank: int) -> list[str]:
    texts, other = [], net()
    attempts: list[dict[str, Any]] = [
        {"tau": 0},
        {"tau": 2},
        {"estimator": "biased"},
        {"masks": "mine"},
        {"block": 0},
        {"block": "row"},
        {"aggregation": "ring"},
        {"value_dtype": torch.float16},
        {"warmup_steps": -1},
        {"tau": 0.5 if rank else 0.25},
        {"aggregation": "server" if rank else "gather"},
    ]
    for options in attempts:
        with pytest.raises(ConfigError) as error:
            BlockSparseState(**options)
        texts.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        BlockSparseState(estimator="error_feedback").state_dict()
    texts.append(str(error.value))
    for model, options in ((net(), {"model": other}), (nn.EmbeddingBag(5, 3, sparse=True), {})):
        ddp, _ = wrap(model, options)
        with pytest.raises((ConfigError, RuntimeError)) as error:
            ddp(torch.tensor([[1, 2]]) if isinstance(model, nn.EmbeddingBag) else batch(rank, 0)).sum().backward()
        texts.append(str(error.value))
    return texts


def test_refusals(ranks: RankPool) -> None:
    for texts in ranks.run(refusals, 2):
        assert texts[:9] == [
            "tau: must be a number above 0 and up to 1, got 0",
            "tau: must be a number above 0 and up to 1, got 2",
            "estimator: allowed are unbiased, error_feedback, control_variate, got 'biased'",
            "masks: allowed are independent, permutation, shared, got 'mine'",
            "block: must be a positive whole number of elements, or a sequence of such, got 0",
            "block: a name can only be \"tensor\", got 'row'",
            "aggregation: allowed are gather, server, got 'ring'",
            "value_dtype: allowed are None and torch.bfloat16, got torch.float16",
            "warmup_steps: must be a whole number from 0, got -1",
        ]
        assert texts[9].startswith("tau: rank ") and texts[10].startswith("aggregation: rank ")
        assert texts[11].startswith("model: residuals are saved by parameter name")
        assert "pass the DDP model that the hook is registered on" in texts[12]
        assert "build embeddings with sparse=False" in texts[13]


def out_of_step(rank: int, aggregation: str) -> None:
    model, state = wrap(net(), {"aggregation": aggregation})
    state.step = 5 * (rank == 2)  # as if only rank 2 had loaded its state
    model(batch(rank, 0)).sum().backward()


@pytest.mark.parametrize("aggregation", ["gather", "server"])
def test_ranks_out_of_step_are_named(ranks: RankPool, aggregation: str) -> None:
    with pytest.raises(RankFailed) as error:
        ranks.run(out_of_step, 3, (aggregation,), timeout=20)
    assert sorted(error.value.reports) == [0, 1, 2]
    for rank, text in error.value.reports.items():
        assert f"{Disagreement.__name__}: step: rank {rank} is at {6 if rank == 2 else 1}, " in text


def deserted(rank: int, aggregation: str) -> None:
    model, _ = wrap(net(), {"aggregation": aggregation})
    for step in range(3):
        if rank == 1 and step == 2:
            os._exit(3)
        model(batch(rank, step)).sum().backward()


@pytest.mark.parametrize("aggregation", ["gather", "server"])
def test_a_lost_worker_raises_on_the_others(ranks: RankPool, aggregation: str) -> None:
    with pytest.raises(RankFailed) as error:
        ranks.run(deserted, 3, (aggregation,), timeout=30)
    assert sorted(error.value.reports) == [0, 1, 2]
    assert "RuntimeError" in error.value.reports[0]


def warnings(rank: int) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("decent_opt.integrations")
    logger.addHandler(handler)
    try:
        for tau in (0.9, 1 / 3):
            model, _ = wrap(net(), {"tau": tau})
            train(model, sgd(model), rank, range(2))
    finally:
        logger.removeHandler(handler)
    return texts


def test_warns_of_what_does_not_pay(ranks: RankPool) -> None:
    (dear,), *others = ranks.run(warnings, 3)
    assert dear.startswith("block_sparse_hook sends ")
    assert dear.endswith("tau = 0.9 with aggregation 'gather' does not pay with 3 workers")
    assert others == [[], []]


def one_worker(rank: int) -> bool:
    model, _ = wrap(net(), {"estimator": "error_feedback"})
    reference = net()
    for each in (model, reference):
        train(each, sgd(each), rank, range(3))
    return torch.equal(flat(model), flat(reference))


def test_one_worker_alone_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(one_worker, 1) == [True]
