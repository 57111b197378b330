"""The real DistributedDataParallel on gloo ranks: silent between rounds, equal to DDP where theory says so."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from decent_opt import ConfigError, Decentralized
from decent_opt.integrations.ddp import GossipState, decentralize, gossip_hook
from decent_opt.testing import RankPool, seeded


class Net(nn.Module):
    """With BatchNorm buffers, a layer that may go unused, and optional activation checkpointing."""

    def __init__(self, skip: bool = False, checkpointed: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.first, self.optional, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.skip, self.checkpointed = skip, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        if not self.skip:
            x = x + self.optional(x).tanh()
        return self.last(self.norm(x))


def net(**options: Any) -> Net:
    with seeded(0):
        return Net(**options)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.005)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"ddp": {"find_unused_parameters": True}, "net": {"skip": True}},
    "no_sync": {"no_sync": True},
    "static_graph": {"ddp": {"static_graph": True}},
    "static_graph find_unused": {"ddp": {"static_graph": True, "find_unused_parameters": True}, "net": {"skip": True}},
    "bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
    "checkpointed": {"net": {"checkpointed": True}},
    "checkpointed static_graph": {"net": {"checkpointed": True}, "ddp": {"static_graph": True}},
    "compiled": {"compile": True},
}


def silent(rank: int, folder: str, variant: dict[str, Any]) -> int:
    """Rank 1 begins only after rank 0 has done all that comes before the round: any hidden wait would be a deadlock."""
    ddp = DistributedDataParallel(net(**variant.get("net", {})), **variant.get("ddp", {}))
    model = torch.compile(ddp, backend="aot_eager") if variant.get("compile") else ddp
    optimizer = decentralize(model, torch.optim.SGD(ddp.parameters(), lr=0.1), period=4, timeout=60)
    for round in range(2):
        done = Path(folder) / f"round{round}"
        if rank == 1:
            wait_for(done)
        for step in range(4):
            with ddp.no_sync() if variant.get("no_sync") else contextlib.nullcontext():
                model(batch(rank, step)).square().mean().backward()
            assert next(ddp.parameters()).grad is not None
            if step == 3 and rank == 0:
                done.touch()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return optimizer.decent_round


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_slow_peer_delays_nobody_between_rounds(ranks: RankPool, tmp_path: Path, variant: dict[str, Any]) -> None:
    assert ranks.run(silent, 2, (str(tmp_path), variant)) == [2, 2]


def against_ddp(rank: int, form: str, warmup: int, steps: int) -> float:
    """Relative distance between plain DDP and ours after some steps of SGD."""
    reference, ours = net(norm=False), net(norm=False)
    ddp, model = DistributedDataParallel(reference), DistributedDataParallel(ours)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9 if warmup else 0.0)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if warmup else 0.0)
    options: dict[str, Any] = {"topology": "complete", "period": 1, "warmup_steps": warmup, "timeout": 60}
    if form == "hook":
        model.register_comm_hook(GossipState(optimizer, ddp=model, **options), gossip_hook)
    else:
        optimizer = decentralize(model, optimizer, **options)
    for step in range(steps):
        for network, stepped in ((ddp, plain), (model, optimizer)):
            stepped.zero_grad()
            network(batch(rank, step)).square().mean().backward()
            stepped.step()
    return float((flat(ours) - flat(reference)).norm() / flat(reference).norm())


@pytest.mark.parametrize("form", ["decentralize", "hook"])
@pytest.mark.parametrize("warmup", [0, 12])
def test_complete_graph_at_period_one_and_the_warmup_equal_ddp(ranks: RankPool, form: str, warmup: int) -> None:
    # float32: the mean of parameters and the parameters of the mean gradient differ by rounding only
    assert max(ranks.run(against_ddp, 4, (form, warmup, 12))) <= 1e-6


def both_forms(rank: int, use_amp: bool) -> list[tuple[Tensor, int, int]]:
    results = []
    for form in ("decentralize", "hook"):
        network = net(norm=False)
        model = DistributedDataParallel(network)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"period": 3, "warmup_steps": 4, "outer_momentum": 0.5, "timeout": 60}
        rounds = None
        if form == "hook":
            state = GossipState(optimizer, ddp=model, **options)
            model.register_comm_hook(state, gossip_hook)
            rounds, monitor = state.rounds, state.monitor
        else:
            optimizer = decentralize(model, optimizer, **options)
            rounds, monitor = optimizer.rounds, optimizer.monitor
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=use_amp)
        for step in range(14):
            optimizer.zero_grad()
            scaler.scale(model(batch(rank, step)).square().mean()).backward()
            if use_amp and rank == 1 and step in (5, 8):
                next(model.parameters()).grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        results.append((flat(network), rounds.group["decent_round"], monitor.bytes_sent))
    return results


@pytest.mark.parametrize("use_amp", [False, True])
def test_the_registered_form_does_what_decentralize_does(ranks: RankPool, use_amp: bool) -> None:
    for (ours, rounds, sent), (hooked, hooked_rounds, hooked_sent) in ranks.run(both_forms, 3, (use_amp,)):
        # Warm-up gradients are summed in another order (DDP's buckets), which Adam's division keeps at rounding level.
        assert torch.allclose(ours, hooked, rtol=1e-4, atol=1e-6) and bool(ours.isfinite().all())
        assert rounds == hooked_rounds == 3
        assert abs(sent - hooked_sent) < 0.05 * sent


def buffers(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    network = net()
    with torch.no_grad():
        network.norm.running_mean.fill_(float(rank))
    model = DistributedDataParallel(network)
    optimizer = decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1), period=2, timeout=60)
    at_start = network.norm.running_mean.clone()
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    own = network.norm.running_mean.clone()
    with optimizer.averaged():
        mean = network.norm.running_mean.clone()
        parameters = flat(network)
    assert torch.equal(network.norm.running_mean, own)
    return at_start, own, mean, parameters


def test_buffers_start_equal_stay_local_and_are_averaged_for_evaluation(ranks: RankPool) -> None:
    results = ranks.run(buffers, 3)
    for at_start, _, mean, parameters in results:
        assert torch.equal(at_start, torch.zeros(8))
        assert torch.allclose(mean, torch.stack([own for _, own, _, _ in results]).mean(0), atol=1e-6)
        assert torch.equal(parameters, results[0][3])
    assert not torch.equal(results[0][1], results[1][1])


def refusals(rank: int) -> list[str]:
    network = net()
    texts = []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    ours = Decentralized(torch.optim.SGD(network.parameters(), lr=0.1))
    unused = DistributedDataParallel(net(), find_unused_parameters=True)
    for attempt in (
        lambda: GossipState(ours),
        lambda: GossipState(optimizer, ddp=unused),
        lambda: decentralize(network, ours, period=3),
        lambda: decentralize(network, optimizer, periods=3),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        texts.append(str(error.value))
    assert decentralize(network, ours) is ours
    return texts


def test_refusals(ranks: RankPool) -> None:
    twice, unused, options, typo = ranks.run(refusals, 2)[0]
    assert "decentralised already" in twice
    assert unused.startswith("find_unused_parameters: got True") and "decentralize()" in unused
    assert options == "options: ['period'] belong to the optimizer, which is decentralised already"
    assert typo.startswith("periods: no such option; allowed are period, topology")


def accumulate(rank: int) -> Tensor:
    """Four micro-batches are one optimizer step, and the period counts steps."""
    network = net(norm=False)
    model = DistributedDataParallel(network)
    optimizer = decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1), period=2, topology="complete")
    for step in range(4):
        for micro in range(4):
            with model.no_sync() if micro < 3 else contextlib.nullcontext():
                model(batch(rank, 4 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.decent_round == 2
    dist.barrier()
    return flat(network)


def test_accumulation_counts_steps(ranks: RankPool) -> None:
    first, second = ranks.run(accumulate, 2)
    assert torch.equal(first, second)
