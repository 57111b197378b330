"""The contract that every optimizer of decent_opt keeps: whatever torch's own optimizers allow works on it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler

import decent_opt
from decent_opt import CPDSGDM, PDSGDM, ConfigError, Decentralized, LocalAdamW
from decent_opt.testing import run_ranks, seeded

Make = Callable[..., Decentralized]


def local_adamw(params: Any, second_moment: Any, options: dict[str, Any]) -> Decentralized:
    """It needs a warm-up, where the others can do without."""
    options = {"lr": 0.05, "refresh_every": 1, **options, "warmup_steps": options.get("warmup_steps") or 2}
    return LocalAdamW(params, second_moment=second_moment, **options)


OPTIMIZERS: dict[str, Make] = {
    "PDSGDM": lambda params, **o: PDSGDM(params, **{"lr": 0.05, **o}),
    "CPDSGDM": lambda params, **o: CPDSGDM(params, **{"lr": 0.05, **o}),
    "CPDSGDM fresh": lambda params, **o: CPDSGDM(params, **{"lr": 0.05, "order": "fresh", **o}),
    "SGD without momentum": lambda params, **o: Decentralized(torch.optim.SGD(params, lr=0.05), **o),
    "AdamW": lambda params, **o: Decentralized(torch.optim.AdamW(params, lr=0.05), **o),
    "fused AdamW": lambda params, **o: Decentralized(torch.optim.AdamW(params, lr=0.05, fused=True), **o),
    "Adagrad": lambda params, **o: Decentralized(torch.optim.Adagrad(params, lr=0.05), **o),
    "NAdam": lambda params, **o: Decentralized(torch.optim.NAdam(params, lr=0.05), **o),
    "LocalAdamW trend": lambda params, **o: local_adamw(params, "trend", o),
    "LocalAdamW refreshed": lambda params, **o: local_adamw(params, "refreshed", o),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def backward(model: nn.Module, seed: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_every_exported_optimizer_is_under_the_contract() -> None:
    exported = [v for v in vars(decent_opt).values() if isinstance(v, type) and issubclass(v, Decentralized)]
    model = model_of()
    made = {type(make(model.parameters())) for make in OPTIMIZERS.values()}
    assert set(exported) <= made


@every_optimizer
def test_one_worker_is_the_bare_optimizer_bit_for_bit(make: Make) -> None:
    ours, bare = model_of(), model_of()
    optimizer = make(ours.parameters(), outer_momentum=0.5, warmup_steps=3, period=2)
    plain = copy.deepcopy(make(bare.parameters()).base)
    for a, b in zip(plain.param_groups, make(bare.parameters()).base.param_groups, strict=True):
        a["params"] = b["params"]
    assert torch.equal(train(ours, optimizer, range(9)), train(bare, plain, range(9)))
    assert optimizer.decent_round == 0 and optimizer.decent_step == 9


@every_optimizer
def test_state_and_groups_are_the_bases(make: Make) -> None:
    model = model_of()
    optimizer = make(model.parameters())

    def check(o: Decentralized) -> None:
        assert o.state is o.base.state and o.param_groups is o.base.param_groups and o.defaults is o.base.defaults

    train(model, optimizer, range(2))
    check(optimizer)
    check(copy.deepcopy(optimizer))
    check(pickle.loads(pickle.dumps(optimizer)))
    optimizer.load_state_dict(optimizer.state_dict())
    check(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    check(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)


@every_optimizer
def test_copies_go_on_exactly(make: Make) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    train(model, optimizer, range(3))
    twin_model, twin = copy.deepcopy((model, optimizer))
    pickled_model, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    expected = train(model, optimizer, range(3, 6))
    assert torch.equal(train(twin_model, twin, range(3, 6)), expected)
    assert torch.equal(train(pickled_model, pickled, range(3, 6)), expected)
    assert optimizer.decent_step == twin.decent_step == pickled.decent_step == 6


@every_optimizer
def test_a_checkpoint_goes_on_exactly_and_loads_with_weights_only(make: Make) -> None:
    model = model_of()
    optimizer = make(model.parameters(), period=[(0, 2), (5, 4)])
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = model_of(seed=1)
    resumed = make(other.parameters())
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(train(other, resumed, range(3, 6)), expected)
    assert resumed.decent_step == 6 and resumed.param_groups[0]["period"] == "0:2,5:4"


@every_optimizer
def test_a_plain_checkpoint_of_the_base_loads(make: Make) -> None:
    model = model_of()
    wrapped = make(model.parameters())
    of_torch = next(c for c in type(wrapped.base).__mro__ if c.__module__.startswith("torch."))
    plain = of_torch(model.parameters(), lr=0.01)
    wrapped.load_state_dict(plain.state_dict())
    train(model, wrapped, range(2))
    assert wrapped.decent_step == 2 and wrapped.param_groups[0]["period"] == 8


@every_optimizer
def test_closures(make: Make) -> None:
    ours, plain = model_of(), model_of()
    optimizer, reference = make(ours.parameters()), make(plain.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(ours, 0)

    loss = optimizer.step(closure)
    train(plain, reference, range(1))
    assert isinstance(loss, Tensor) and torch.equal(flat(ours), flat(plain))


def test_lbfgs_takes_its_closure() -> None:
    model = model_of()
    optimizer = Decentralized(torch.optim.LBFGS(model.parameters(), max_iter=4))

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, 0)

    first = optimizer.step(closure)
    assert optimizer.step(closure).item() < first.item()


@every_optimizer
def test_step_and_state_hooks_run_once_and_see_the_wrapper(make: Make) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    seen: list[tuple[str, object]] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("post", o)))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("save pre", o)))
    optimizer.register_state_dict_post_hook(lambda o, _: seen.append(("save post", o)))
    optimizer.register_load_state_dict_pre_hook(lambda o, _: seen.append(("load pre", o)))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("load post", o)))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert [name for name, _ in seen] == ["pre", "post", "save pre", "save post", "load pre", "load post"]
    assert all(who is optimizer for _, who in seen)


@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(make: Make, set_to_none: bool) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    backward(model, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum="betas" in o.defaults),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@every_optimizer
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_every_scheduler_reaches_the_base(make: Make, name: str) -> None:
    ours, plain = model_of(), model_of()
    optimizer, reference = make(ours.parameters()), make(plain.parameters()).base
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*")
        first, second = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
        arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
        for step in range(6):
            train(ours, optimizer, range(step, step + 1))
            train(plain, reference, range(step, step + 1))
            first.step(*arguments)
            second.step(*arguments)
            assert optimizer.base.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert torch.equal(flat(ours), flat(plain))


@every_optimizer
def test_add_param_group_trains_and_counts(make: Make) -> None:
    model, extra = model_of(), nn.Parameter(torch.ones(4))
    optimizer = make(model.parameters(), period=3)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5, "tag": "mine"})
    assert optimizer.param_groups[1]["tag"] == "mine" and optimizer.param_groups[1]["decent_step"] == 2
    optimizer.zero_grad()
    backward(model, 0)
    extra.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.decent_step == 3 and not torch.equal(extra, torch.ones(4))
    with pytest.raises(ConfigError, match="period: a parameter group has 5, the first group has 3"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "period": 5})


@every_optimizer
def test_our_hyperparameters_are_in_every_group(make: Make) -> None:
    model = model_of()
    groups = [{"params": list(model[0].parameters()), "mine": 1}, {"params": list(model[2].parameters())}]
    optimizer = make(groups, period=5, outer_momentum=0.25, warmup_steps=2, global_every=7)
    for group in optimizer.param_groups:
        assert (group["period"], group["outer_momentum"], group["warmup_steps"], group["global_every"]) == (
            5,
            0.25,
            2,
            7,
        )
        ours = {k: v for k, v in group.items() if k.startswith("decent_") or k in ("period", "momentum_sync")}
        assert all(v is None or isinstance(v, (int, float, str)) for v in ours.values())
    assert optimizer.param_groups[0]["mine"] == 1


def _bf16_state(rank: int) -> bool:
    model = model_of(dtype=torch.bfloat16)
    optimizer = PDSGDM(model.parameters(), lr=0.05, period=2, outer_momentum=0.5)
    train(model, optimizer, range(6))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    equal = True
    for index, parameter in enumerate(model.parameters()):
        for key, value in saved["state"][index].items():
            loaded = optimizer.state[parameter][key]
            equal &= loaded.dtype == value.dtype and torch.equal(loaded, value)
    velocity = optimizer.state[next(model.parameters())]["decent_outer_momentum"]
    return equal and velocity.dtype == torch.float32 and bool(velocity.any())


def test_wide_state_of_bf16_parameters_is_loaded_bit_for_bit() -> None:
    assert run_ranks(_bf16_state, 2, "loopback") == [True, True]


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_on_one_worker_equals_the_base(make: Make, unscale: bool) -> None:
    """Steps 2 and 4 overflow; the scale is a power of two, so that scaling is exact."""
    results = []
    for wrapped in (True, False):
        model = model_of()
        optimizer = make(model.parameters()) if wrapped else make(model.parameters()).base
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            optimizer.zero_grad()
            batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(batch).square().mean()).backward()
            if step in (2, 4):
                next(model.parameters()).grad.fill_(float("inf"))
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append((flat(model), scaler.get_scale()))
        if wrapped:
            assert optimizer.decent_step == 6
    (ours, our_scale), (plain, plain_scale) = results
    assert torch.equal(ours, plain) and our_scale == plain_scale == 2.0 and bool(ours.isfinite().all())


def _overflow_on_one_rank(rank: int, make: Make, options: dict[str, Any], unscale: bool) -> tuple[Any, ...]:
    model = model_of()
    optimizer = make(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(8):
        optimizer.zero_grad()
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        scaler.scale(model(batch).square().mean()).backward()
        if rank == 1 and step in (1, 5):
            next(model.parameters()).grad.fill_(float("nan"))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    finite = all(bool(torch.as_tensor(v).isfinite().all()) for s in optimizer.state.values() for v in s.values())
    finite = finite and bool(flat(model).isfinite().all())
    rounds = (8 - optimizer.param_groups[0]["warmup_steps"]) // 2
    dense = optimizer.param_groups[0]["decent_gamma"] is None
    return optimizer.decent_step, optimizer.decent_round == rounds, finite, flat(model), dense


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("warmup", [0, 4])
def test_an_overflow_on_one_rank_never_costs_a_round(make: Make, unscale: bool, warmup: int) -> None:
    options = {"period": 2, "warmup_steps": warmup, "topology": "complete"}
    results = run_ranks(_overflow_on_one_rank, 3, "loopback", (make, options, unscale), timeout=30)
    assert [r[:3] for r in results] == [(8, True, True)] * 3
    # Step 8 ends with an exact average; compressed ones are no exact ones.
    assert all(torch.equal(r[3], results[0][3]) for r in results) or not results[0][4]


def _dcp(rank: int, make: Make) -> tuple[int, int, bool]:
    source, target = model_of(), model_of(seed=1)
    first = make(source.parameters(), period=1, outer_momentum=0.5)
    train(source, first, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(source, first))  # torch loads without copying
    second = make(target.parameters(), period=1, outer_momentum=0.5)
    if rank == 0:  # one rank alone: nothing here may wait for the other
        assert get_optimizer_state_dict(target, second)["param_groups"][0]["decent_step"] == 0
        assert second.decent_step == 0 and second.decent_round == 0
    set_optimizer_state_dict(target, second, saved)
    target.load_state_dict(source.state_dict())
    same = torch.equal(train(source, first, range(3, 6)), train(target, second, range(3, 6)))
    return second.decent_step, second.decent_round + second.param_groups[0]["warmup_steps"], same


@every_optimizer
def test_distributed_checkpoint_gets_and_sets_without_a_round(make: Make) -> None:
    assert run_ranks(_dcp, 2, "loopback", (make,), timeout=30) == [(6, 6, True)] * 2


def test_what_is_no_optimizer_is_refused() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="base: a torch optimizer that is not decentralised already, got PDSGDM"):
        Decentralized(PDSGDM(model.parameters()))
    with pytest.raises(ConfigError, match="got int"):
        Decentralized(3)  # type: ignore[arg-type]
