"""What once went wrong, each in its smallest form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decent_opt import PDSGDM, ConfigError, Decentralized, LocalAdamW
from decent_opt.integrations.ddp import GossipState
from decent_opt.testing import RankPool, run_ranks, seeded


def model_of(seed: int = 0) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Tensor:
    for step in steps:
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return flat(model)


def same_names_in_two_groups(rank: int) -> float:
    a, b = model_of(rank), model_of(10 + rank)
    groups = [{"params": list(a.named_parameters())}, {"params": list(b.named_parameters())}]
    optimizer = PDSGDM(groups, lr=0.05, period=1, topology="complete")
    train(a, optimizer, rank, range(2))
    return float(torch.cat([flat(a), flat(b)]).sum())


def test_groups_with_the_same_parameter_names_are_all_mixed() -> None:
    first, second = run_ranks(same_names_in_two_groups, 2, "loopback")
    assert first == second


def copy_mid_run(rank: int, make: Any) -> bool:
    model = model_of()
    optimizer = make(model.parameters())
    train(model, optimizer, rank, range(7))
    other_model, other = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, rank, range(7, 14))
    return torch.equal(train(other_model, other, rank, range(7, 14)), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: PDSGDM(params, lr=0.05, period=3, outer_momentum=0.5),
        lambda params: LocalAdamW(params, lr=0.05, period=3, warmup_steps=4),
    ],
)
def test_a_copy_between_rounds_keeps_its_own_parameters(make: Any) -> None:
    assert run_ranks(copy_mid_run, 3, "loopback", (make,)) == [True] * 3


def freeze_between_rounds(rank: int, how: str) -> tuple[float, float]:
    model = model_of()
    optimizer = PDSGDM(model.parameters(), lr=0.05, period=4, topology="complete")
    train(model, optimizer, rank, range(2))
    model[0].requires_grad_(False)
    if how == "round":
        train(model, optimizer, rank, range(2, 4))
    else:
        optimizer.consensus_()
    return float(model[0].weight.sum()), optimizer.consensus_distance()


@pytest.mark.parametrize("how", ["round", "consensus"])
def test_parameters_frozen_between_rounds_become_equal(how: str) -> None:
    (first, _), (second, distance) = run_ranks(freeze_between_rounds, 2, "loopback", (how,))
    assert first == second
    assert distance == 0


def outside_the_optimizer(rank: int) -> tuple[float, float]:
    model = model_of(rank)
    model.register_buffer("count", torch.full((2,), rank, dtype=torch.int16))
    optimizer = PDSGDM(model[2].parameters(), model=model)
    model.count = model.count + 1
    model.register_buffer("mean", torch.full((2,), float(rank)))
    optimizer.consensus_()
    return float(flat(model).sum()), float(model.mean.sum() + model.count.sum())


def test_the_rest_of_the_model_starts_equal_and_new_buffers_are_averaged() -> None:
    assert run_ranks(outside_the_optimizer, 2, "loopback")[0] == run_ranks(outside_the_optimizer, 2, "loopback")[1]


def outer_in_the_warmup(rank: int, how: str) -> int:
    model = model_of()
    if how == "unfreeze":
        model[0].requires_grad_(False)
    beta = 0.0 if how == "switch on" else 0.5
    optimizer = PDSGDM(model.parameters(), lr=0.05, period=2, warmup_steps=4, outer_momentum=beta)
    train(model, optimizer, rank, range(2))
    model.requires_grad_(True)
    optimizer.param_groups[0]["outer_momentum"] = 0.5
    train(model, optimizer, rank, range(2, 8))
    return optimizer.decent_round


@pytest.mark.parametrize("how", ["unfreeze", "switch on"])
def test_outer_momentum_may_begin_inside_the_warmup(how: str) -> None:
    assert run_ranks(outer_in_the_warmup, 2, "loopback", (how,)) == [2, 2]


def unused_head(rank: int) -> int:
    model, head = model_of(), nn.Linear(3, 3)
    optimizer = LocalAdamW([*model.parameters(), *head.parameters()], lr=0.01, warmup_steps=3, period=2)
    train(model, optimizer, rank, range(8))
    return optimizer.decent_round


def test_local_adamw_with_a_parameter_that_gets_no_gradient() -> None:
    assert run_ranks(unused_head, 2, "loopback") == [3, 3]


def edited_groups(rank: int) -> tuple[int, int, int]:
    model = model_of()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = LocalAdamW(groups, lr=0.01, warmup_steps=10, period=4)
    train(model, optimizer, rank, range(6))
    optimizer.param_groups[0]["warmup_steps"] = 4
    optimizer.param_groups[0]["period"] = 2
    train(model, optimizer, rank, range(6, 8))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, rank, range(8, 10))
    fixed = optimizer.param_groups[0]["second_moment_fixed"]
    optimizer.param_groups[0]["period"] = [(0, 2)]
    with pytest.raises(ConfigError, match="period: param_groups hold an integer"):
        train(model, optimizer, rank, range(10, 11))
    return fixed, optimizer.decent_round, optimizer.param_groups[1]["period"]


def test_editing_the_first_group_takes_effect_and_survives_a_checkpoint() -> None:
    assert run_ranks(edited_groups, 2, "loopback") == [(1, 2, 2)] * 2


def broken_sink(rank: int) -> int:
    model = model_of()
    calls: list[int] = []

    def sink(_: object) -> None:
        calls.append(1)
        if rank == 0 and len(calls) == 2:
            raise OSError("disk full")

    optimizer = PDSGDM(model.parameters(), lr=0.01, period=1, sinks=[sink])
    for step in range(5):
        try:
            train(model, optimizer, rank, range(step, step + 1))
        except OSError:
            assert step == 1
    return optimizer.decent_round


def test_a_sink_that_fails_costs_no_round() -> None:
    assert run_ranks(broken_sink, 2, "loopback") == [5, 5]


def consensus_with_outer(rank: int) -> float:
    model = model_of()
    optimizer = PDSGDM(model.parameters(), lr=0.05, period=2, outer_momentum=0.5)
    train(model, optimizer, rank, range(5))
    optimizer.consensus_()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, rank, range(5, 6))
    return optimizer.consensus_distance()


def test_outer_momentum_does_not_undo_a_consensus() -> None:
    assert max(run_ranks(consensus_with_outer, 3, "loopback")) < 1e-6


def line_search(rank: int) -> int:
    model = model_of()
    optimizer = Decentralized(
        torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe"), warmup_steps=3, period=1
    )
    for step in range(4):
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * rank + step))

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer.decent_round


def test_a_line_search_in_the_warmup_calls_equally_often_everywhere() -> None:
    assert run_ranks(line_search, 3, "loopback", timeout=30) == [1] * 3


def tied_by_storage(rank: int) -> Tensor:
    a = nn.Parameter(torch.full((3,), float(rank)))
    b = nn.Parameter(a.detach())  # another parameter, the same memory
    optimizer = PDSGDM([a, b], lr=0.1, momentum=0.0, period=1, warmup_steps=1, sync_init=False, topology="complete")
    for _ in range(2):
        a.grad, b.grad = torch.full((3,), 1.0 + rank), torch.full((3,), 2.0 * rank)
        optimizer.step()
    return a.detach()


def test_parameters_that_share_their_memory_are_mixed_once_and_averaged_both() -> None:
    first, second = run_ranks(tied_by_storage, 2, "loopback")
    # x = (0 + 1)/2 - 0.1 ((1.5 + 1) of the warm-up, and the mean of the own gradients 1 and 4 of the round's step)
    assert torch.allclose(first, torch.zeros(3), atol=1e-6)  # 0.5 - 0.1 (2.5 + 2.5)
    assert torch.equal(first, second)


def odd_gradient_strides(rank: int) -> Tensor:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = PDSGDM([weight], lr=1.0, momentum=0.0, warmup_steps=1)
    gradient = torch.arange(6.0).view(2, 3)
    weight.grad = gradient.t().contiguous().t() if rank else gradient
    optimizer.step()
    return weight.detach()


def test_gradients_in_another_memory_order() -> None:
    for weight in run_ranks(odd_gradient_strides, 2, "loopback"):
        assert torch.equal(weight, -torch.arange(6.0).view(2, 3))


def differing_options(rank: int, name: str) -> str:
    values: dict[str, Any] = {"refresh_every": 1 + rank, "second_moment": ("trend", "frozen")[rank]}
    if name == "bad":
        values = {"second_moment": ("trend", "oops")[rank]}
    options = values if name == "bad" else {name: values[name]}
    with pytest.raises(ConfigError) as error:
        LocalAdamW(model_of().parameters(), warmup_steps=2, **options)
    return str(error.value)


@pytest.mark.parametrize("name", ["refresh_every", "second_moment", "bad"])
def test_options_of_local_adamw_are_compared(name: str) -> None:
    for text in run_ranks(differing_options, 2, "loopback", (name,)):
        assert (name if name != "bad" else "second_moment: allowed are") in text


@pytest.mark.parametrize("options", [{"refresh_every": 0}, {"refresh_every": "2"}, {"refresh_memory": 5.0}], ids=str)
def test_bad_options_of_local_adamw(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}: allowed is"):
        LocalAdamW(model_of().parameters(), warmup_steps=2, **options)


def not_a_member(rank: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        PDSGDM(model_of().parameters(), process_group=group, timeout=20).close()
        return "member"
    with pytest.raises(ConfigError) as error:
        PDSGDM(model_of().parameters(), process_group=group, timeout=5)
    return str(error.value)


def test_a_rank_outside_of_the_group_is_refused(ranks: RankPool) -> None:
    results = ranks.run(not_a_member, 3, timeout=40)
    assert results[:2] == ["member"] * 2
    assert results[2].startswith("process_group: this rank is no member of it")


def hook_loads(rank: int) -> tuple[int, torch.dtype]:
    model = model_of().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    GossipState(optimizer, period=2, outer_momentum=0.5)
    for _ in range(4):
        model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    dtype = optimizer.state[next(model.parameters())]["decent_outer_momentum"].dtype
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step()
    return optimizer.param_groups[0]["decent_step"], dtype


def test_the_hooks_optimizer_loads_its_own_and_plain_checkpoints() -> None:
    assert run_ranks(hook_loads, 2, "loopback") == [(1, torch.float32)] * 2


class Rateless(torch.optim.Optimizer):
    """Chooses its own steps; `lr` is None, as in some optimizers with relative steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.01 * parameter.grad.sign())


def test_an_optimizer_without_learning_rate() -> None:
    model = model_of()
    optimizer = Decentralized(Rateless(model.parameters()))
    train(model, optimizer, 0, range(2))
    assert optimizer.decent_step == 2


class _Interrupt:
    """Unpickles to a KeyboardInterrupt in nobody's process but stops the parent in `send`."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def echo(rank: int, value: str) -> str:
    return value


def test_an_interrupted_call_leaves_no_answers_for_the_next() -> None:
    with RankPool(timeout=60) as pool:
        assert pool.run(echo, 2, ("old",)) == ["old"] * 2
        with pytest.raises(KeyboardInterrupt):
            pool.run(echo, 2, (_Interrupt(),))
        assert pool.run(echo, 2, ("new",)) == ["new"] * 2
        pool._processes[1].kill()
        pool._processes[1].join(10)
        assert pool.run(echo, 2, ("newer",)) == ["newer"] * 2
