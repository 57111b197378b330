"""CPD-SGDM as an optimizer: resume with messages in flight, restarts, what is not finite, hidden waits."""

from __future__ import annotations

import copy
import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_opt import CPDSGDM, PDSGDM, ConfigError, Decentralized, LocalAdamW
from decent_opt.testing import RankPool, run_ranks, seeded
from tests.delayed import Delayed

OPTIONS: dict[str, Any] = {"lr": 0.05, "period": 4, "outer_momentum": 0.5}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Tensor:
    for step in steps:
        batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(batch.to(flat(model).dtype)).square().mean().backward()
        optimizer.step()
    return flat(model)


def pulls_of(optimizer: Decentralized) -> Tensor:
    return torch.cat([entries["decent_pull"].reshape(-1).double() for entries in optimizer.state.values()])


def save_and_go_on(rank: int, cut: int, how: str, order: str) -> bool:
    """Cut with messages on their way or not; what is loaded goes on like what was never saved."""
    options = {**OPTIONS, "order": order}
    reference, model = model_of(), model_of()
    undisturbed = CPDSGDM(reference.parameters(), **options)
    expected = train(reference, undisturbed, rank, range(20))
    undisturbed.close()
    optimizer = CPDSGDM(model.parameters(), **options)
    train(model, optimizer, rank, range(cut))
    if how == "copied":
        model, optimizer = copy.deepcopy((model, optimizer))
    elif how == "loaded":
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = model_of()
        optimizer = CPDSGDM(model.parameters(), sync_init=False, **options)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    elif how == "saved by rank 0 alone" and rank == 0:
        optimizer.state_dict()
    elif how == "evaluated":
        with optimizer.averaged():
            pass
    return torch.equal(train(model, optimizer, rank, range(cut, 20)), expected)


@pytest.mark.parametrize("how", ["copied", "loaded", "saved by rank 0 alone", "evaluated"])
@pytest.mark.parametrize(("cut", "order"), [(3, "paper"), (4, "paper"), (10, "paper"), (9, "fresh")])
def test_nothing_in_flight_is_lost(how: str, cut: int, order: str) -> None:
    assert run_ranks(save_and_go_on, 3, "loopback", (cut, how, order), timeout=60) == [True] * 3


def kept(rank: int, dtype: torch.dtype, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters before and after a round without local steps, and the pulls."""
    model = model_of(dtype)
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=5, order=order)
    train(model, optimizer, rank, range(14))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["momentum"] = 0.0
    before = flat(model)
    train(model, optimizer, rank, range(14, 15))
    optimizer.close()
    return before, flat(model), pulls_of(optimizer)


@pytest.mark.parametrize("order", ["paper", "fresh"])
def test_mixing_keeps_the_average(order: str) -> None:
    results = run_ranks(kept, 4, "loopback", (torch.float32, order))
    before, after, pulls = (torch.stack(part).double() for part in zip(*results, strict=True))
    assert (after - before).abs().max() > 1e-4, "nothing was mixed"
    assert (after.mean(0) - before.mean(0)).abs().max() < 1e-6
    assert pulls.mean(0).abs().max() < 1e-6


def restarted(rank: int, how: str) -> tuple[list[str], bool]:
    """Kinds of the rounds after a change, and whether the pulls sum to zero and the copies are the neighbours' too."""
    model = model_of()
    old: Decentralized
    if how == "from pd":
        old = PDSGDM(model.parameters(), lr=0.05, period=4)
    else:
        old = CPDSGDM(model.parameters(), lr=0.05, period=4, topology="complete" if how == "other W" else "ring")
    train(model, old, rank, range(9))
    saved = old.state_dict()
    fresh = model_of()
    new = CPDSGDM(fresh.parameters(), lr=0.05, period=4)
    fresh.load_state_dict(model.state_dict())
    new.load_state_dict(saved)
    train(fresh, new, rank, range(9, 20))
    new.close()
    total = pulls_of(new).reshape(1, -1).clone()
    new.rounds.transport.average_([total])
    return [r.kind for r in new.monitor.records], bool(total.abs().max() < 1e-6)


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ("same W", ["gossip", "gossip", "gossip"]),
        ("other W", ["average", "gossip", "gossip"]),
        ("from pd", ["average", "gossip", "gossip"]),
    ],
)
def test_copies_of_another_w_are_replaced_after_an_exact_average(how: str, kinds: list[str]) -> None:
    for found, consistent in run_ranks(restarted, 4, "loopback", (how,)):
        assert found == kinds
        assert consistent


def poisoned(rank: int) -> tuple[bool, bool, bool]:
    model = model_of()
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=2)
    train(model, optimizer, rank, range(4))
    if rank == 0:
        next(model.parameters()).data[0, 0] = float("nan")
    train(model, optimizer, rank, range(4, 10))
    optimizer.close()
    copies = [e["decent_public_copy"].isfinite().all() for e in optimizer.state.values()]
    return bool(flat(model).isfinite().all()), all(map(bool, copies)), bool(pulls_of(optimizer).isfinite().all())


def test_what_is_not_finite_stays_on_its_worker() -> None:
    assert run_ranks(poisoned, 4, "loopback") == [(True, True, True)] * 4


def different_starts(rank: int) -> str:
    model = model_of()
    with torch.no_grad():
        next(model.parameters())[0, 0] += rank
    try:
        CPDSGDM(model.parameters(), sync_init=False)
    except ConfigError as error:
        return str(error)
    return ""


def test_copies_begin_at_the_same_start() -> None:
    assert all(
        m.startswith("sync_init=False, start of 0 of group 0") for m in run_ranks(different_starts, 2, "loopback")
    )


def any_base(rank: int, kind: str, dtype: torch.dtype) -> tuple[float, float]:
    model = model_of(dtype)
    optimizer: Decentralized
    if kind == "local":
        options = {"warmup_steps": 5, "second_moment": "trend"}
        optimizer = LocalAdamW(model.parameters(), lr=0.01, period=2, algorithm="cpd", **options)  # type: ignore[arg-type]
    else:
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = Decentralized(base, algorithm="cpd", compressor="sign", period=2, dense=["*1 of group 0"])
    train(model, optimizer, rank, range(60))
    distance = optimizer.consensus_distance()
    optimizer.consensus_()
    train(model, optimizer, rank, range(60, 62))
    optimizer.close()
    return distance, float(flat(model).abs().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "local"])
def test_any_base_and_sixteen_bits(kind: str, dtype: torch.dtype) -> None:
    for distance, size in run_ranks(any_base, 4, "loopback", (kind, dtype)):
        assert 0 < distance < 0.5
        assert size == size


def frozen(rank: int) -> list[int]:
    """Freeze a layer and train it again; the worker's rounds and bytes."""
    model = model_of()
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=2)
    train(model, optimizer, rank, range(4))
    for p in model[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    train(model, optimizer, rank, range(4, 8))
    for p in model[0].parameters():  # type: ignore[index]
        p.requires_grad_(True)
    train(model, optimizer, rank, range(8, 12))
    optimizer.close()
    total = pulls_of(optimizer).reshape(1, -1).clone()
    optimizer.rounds.transport.average_([total])
    assert total.abs().max() < 1e-6
    return [sum(r.bytes_sent.values()) for r in optimizer.monitor.records]


def test_freezing_keeps_the_copies_together() -> None:
    for sizes in run_ranks(frozen, 3, "loopback"):
        assert sizes[0] == sizes[1] == sizes[4] == sizes[5] > sizes[2] == sizes[3]


def exposed(rank: int, order: str, share: float) -> tuple[float, float, Tensor]:
    """Least seconds waited in a round, the delay (a share of the compute of a period, 80 ms a step), and the result."""
    period, rounds, compute = 5, 5, 0.08
    model = model_of()
    optimizer = CPDSGDM(model.parameters(), lr=0.01, period=period, order=order, timeout=60)
    delay = share * period * compute
    if share:
        optimizer.rounds.runner.gossip.transport = Delayed(optimizer.rounds.transport, delay)
    for step in range(period * (rounds + 1)):
        time.sleep(compute if share else 0.0)  # a step on an accelerator: the host is free and the clock runs
        train(model, optimizer, rank, range(step, step + 1))
    records = [r for r in optimizer.monitor.records if r.kind == "gossip"][:rounds]
    optimizer.close()
    return min(sum(r.wait_seconds.values()) for r in records), delay, flat(model)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_paper_s_order_hides_the_wait(ranks: RankPool, share: float) -> None:
    hidden = ranks.run(exposed, 2, ("paper", share))
    shown = ranks.run(exposed, 2, ("fresh", share))
    prompt = ranks.run(exposed, 2, ("paper", 0.0))
    for (waited, delay, x), (waited_without, _, _), (_, _, same) in zip(hidden, shown, prompt, strict=True):
        # 5 %, and 1 ms that a busy machine may need to hand over a message that is there
        assert waited <= 0.05 * delay + 1e-3
        assert waited_without >= 0.9 * delay
        assert torch.equal(x, same)


def gossip_only(rank: int, gamma: float, rounds: int) -> float:
    """Pure gossip of top-10 %: no gradients."""
    x = nn.Parameter(torch.zeros(2000))
    optimizer = CPDSGDM(
        [x], lr=0.0, momentum=0.0, period=1, compressor="topk:share=0.1,block=2000", order="fresh", gamma=gamma
    )
    for step in range(rounds):
        x.grad = torch.zeros_like(x)
        if step == 1:  # the public copies begin at the first step, where all workers are equal
            x.data.copy_(torch.randn(2000, generator=torch.Generator().manual_seed(rank)))
        optimizer.step()
    optimizer.close()
    return optimizer.consensus_distance()


def test_the_guard_notices_a_gamma_that_is_too_large(caplog: pytest.LogCaptureFixture) -> None:
    fine = run_ranks(gossip_only, 8, "loopback", (0.15, 300), timeout=100)
    assert max(fine) < 1.0 and not caplog.records
    run_ranks(gossip_only, 8, "loopback", (0.4, 600), timeout=100)
    messages = [record.getMessage() for record in caplog.records]
    assert messages and all("make gamma smaller (it is 0.4, try 0.133333)" in m for m in messages)


def gammas(rank: int) -> tuple[float, float, float]:
    made = [
        CPDSGDM(model_of().parameters(), **o).param_groups[0]["decent_gamma"]
        for o in ({}, {"gamma": 1}, {"gamma": "theory"})
    ]
    return made[0], made[1], made[2]


def test_gamma_by_the_compressor_by_number_and_by_theory() -> None:
    for default, given, theory in run_ranks(gammas, 8, "loopback"):
        assert (default, given) == (0.4, 1.0)
        assert theory == pytest.approx(0.01246, abs=6e-6)  # sign on a ring of 8


def tuned(rank: int, how: str) -> tuple[float, float, bool]:
    """gamma at the end, the default, and whether a resumed run has the same."""
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.0, "period": 1, "gamma": "auto", "compressor": how}
    model, again = model_of(), model_of()
    optimizer = CPDSGDM(model.parameters(), **options)
    train(model, optimizer, rank, range(104))
    second = CPDSGDM(again.parameters(), sync_init=True, **options)
    again.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same = torch.equal(train(model, optimizer, rank, range(104, 160)), train(again, second, rank, range(104, 160)))
    assert optimizer.param_groups[0]["decent_gamma"] == second.param_groups[0]["decent_gamma"]
    optimizer.close()
    return optimizer.param_groups[0]["decent_gamma"], optimizer.rounds.runner.compressor.gamma, same


@pytest.mark.parametrize("how", ["sign", "topk:share=0.1,block=64"])
def test_gamma_tunes_itself_alike_on_all_ranks(how: str) -> None:
    results = run_ranks(tuned, 4, "loopback", (how,), timeout=60)
    assert len({gamma for gamma, _, _ in results}) == 1
    for gamma, default, same in results:
        assert gamma > default / 4
        assert same


def unfrozen(rank: int) -> tuple[list[str], float, float]:
    """A layer that is trained from step 5 on only, and has parted until the next round."""
    model = model_of()
    for p in model[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=4, compressor="identity", gamma=1.0, order="fresh")
    train(model, optimizer, rank, range(5))
    for p in model[0].parameters():  # type: ignore[index]
        p.requires_grad_(True)
    train(model, optimizer, rank, range(5, 12))
    for group in optimizer.param_groups:
        group.update(lr=0.0, momentum=0.0)
    train(model, optimizer, rank, range(12, 60))
    optimizer.close()
    total = pulls_of(optimizer).reshape(1, -1).clone()
    optimizer.rounds.transport.average_([total])
    kinds = [r.kind for r in optimizer.monitor.records][:4]
    return kinds, float(total.abs().max()), optimizer.consensus_distance()


def test_what_is_unfrozen_between_rounds_is_averaged_before_its_copies_begin() -> None:
    for kinds, total, distance in run_ranks(unfrozen, 3, "loopback"):
        assert kinds == ["gossip", "average", "gossip", "gossip"]
        assert total < 1e-6
        assert distance < 1e-5  # copies that began apart would keep the workers apart for ever


def one_of_another_state(rank: int) -> list[str]:
    model, fresh = model_of(), model_of()
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=4)
    train(model, optimizer, rank, range(9))
    saved = optimizer.state_dict()
    if rank == 1:
        for entries in saved["state"].values():
            del entries["decent_public_copy"], entries["decent_pull"]
    new = CPDSGDM(fresh.parameters(), lr=0.05, period=4)
    new.load_state_dict(saved)
    train(fresh, new, rank, range(9, 20))
    new.close()
    return [r.kind for r in new.monitor.records]


def test_all_ranks_average_when_the_state_of_one_does_not_fit() -> None:
    assert run_ranks(one_of_another_state, 3, "loopback") == [["average", "gossip", "gossip"]] * 3


@pytest.mark.parametrize("compressor", ["sign", "topk:share=0.2", "bf16"])
def test_identical_data_is_warned_about(compressor: str, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(on_the_same_data, 3, "loopback", (compressor, True))
    assert len([r for r in caplog.records if "same data" in r.getMessage()]) == 3
    caplog.clear()
    run_ranks(on_the_same_data, 3, "loopback", (compressor, False))
    assert not caplog.records


def on_the_same_data(rank: int, compressor: str, same: bool) -> None:
    model = model_of()
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=2, compressor=compressor)
    train(model, optimizer, 0 if same else rank, range(6))
    optimizer.close()


def strided(rank: int, dense: bool) -> Tensor:
    """A parameter whose elements do not lie densely, or the same values where they do."""
    values = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    room = torch.zeros(40, 48)
    x = nn.Parameter(values.clone() if dense else room[:, :24])
    x.data.copy_(values)
    optimizer = CPDSGDM([x], lr=0.05, period=3, outer_momentum=0.4)
    for step in range(30):
        x.grad = torch.randn(40, 24, generator=torch.Generator().manual_seed(100 * rank + step)) + x.detach()
        optimizer.step()
    optimizer.close()
    return x.detach().clone()


def test_scattered_parameters_are_mixed_like_dense_ones() -> None:
    for scattered, dense in zip(
        run_ranks(strided, 3, "loopback", (False,)), run_ranks(strided, 3, "loopback", (True,)), strict=True
    ):
        assert torch.allclose(scattered, dense, rtol=0, atol=1e-5)


def restarted_tuning(rank: int) -> list[str]:
    model = model_of()
    optimizer = CPDSGDM(model.parameters(), lr=0.05, period=1, gamma="auto")
    train(model, optimizer, rank, range(40))
    before = optimizer.param_groups[0]["decent_auto"]
    optimizer.consensus_()
    return [before, optimizer.param_groups[0]["decent_auto"]]


def test_an_exact_average_restarts_the_tuning_of_gamma() -> None:
    for before, after in run_ranks(restarted_tuning, 3, "loopback"):
        assert before.split(";")[2] != "inf" and after.split(";")[2] == "inf"
        assert before.split(";")[:2] == after.split(";")[:2]  # gamma and its ceiling stay
