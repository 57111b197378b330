"""IASGD: the matrix twin under every way to get the mean, and what torch allows on an optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from decent_opt import IASGD, ConfigError
from decent_opt import simulation as twins
from decent_opt.integrations.ddp_blocks import BlockSparseState, block_sparse_hook
from decent_opt.sparsification import BlockMean, BlockSampler
from decent_opt.testing import RankPool, run_ranks, seeded
from decent_opt.theory import nesterov_constants, sparsified_dissimilarity

D, STEPS = 20, 30
TOLERANCE = 1e-10  # float64; sums in another order


def problem_of(n: int) -> twins.LeastSquares:
    return twins.least_squares(n, 40, D, seed=2)


def constants_for(n: int, tau: float) -> dict[str, float]:
    problem = problem_of(n)
    growth = sparsified_dissimilarity(problem.dissimilarity, n, tau)
    return {"L": problem.mean_L, "mu": problem.mu, "growth": growth}


def twin_of(n: int, tau: float, first_draw: int = 0, block: int = 2) -> tuple[Tensor, Tensor]:
    """z and v after every step."""
    problem, sampler = problem_of(n), BlockSampler.over(D, tau, block=block)
    mask, exact = twins.mask_of(sampler, D), sampler.kept / sampler.blocks.count
    c = nesterov_constants(**constants_for(n, tau))
    x0 = torch.zeros(D, dtype=torch.float64)
    twin = twins.IASGD(x0, problem.gradients, n, lambda i, step: mask(i, step + first_draw), tau=exact, constants=c)
    z, v = [], []
    for _ in range(STEPS):
        twin.step()
        z.append(c.alpha * twin.v + (1 - c.alpha) * twin.x)
        v.append(twin.v)
    return torch.stack(z), torch.stack(v)


def descend(rank: int, n: int, tau: float, aggregation: Any) -> tuple[Tensor, Tensor]:
    """z and v after every step, in two parameters that are one vector."""
    problem = problem_of(n)
    parts = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (6, D - 6)]
    optimizer = IASGD.for_smoothness(parts, **constants_for(n, tau))
    mean, z, v = BlockMean(D, tau, block=2, aggregation=aggregation), [], []
    for _ in range(STEPS):
        g = mean.mean_(problem.gradient(rank, torch.cat([p.detach() for p in parts])))
        for parameter, gradient in zip(parts, g.split([6, D - 6]), strict=True):
            parameter.grad = gradient
        optimizer.step()
        z.append(torch.cat([p.detach() for p in parts]))
        v.append(torch.cat([optimizer.state[p]["v"] for p in parts]))
    return torch.stack(z), torch.stack(v)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("aggregation", ["gather", "server"])
def test_ranks_are_the_twin(ranks: RankPool, n: int, aggregation: str) -> None:
    z, v = twin_of(n, 0.4)
    virtual = run_ranks(descend, n, "loopback", (n, 0.4, aggregation), timeout=60)
    for own_z, own_v in virtual:
        assert float((own_z - z).abs().max()) <= TOLERANCE and float((own_v - v).abs().max()) <= TOLERANCE
    for own_z, own_v in virtual + ranks.run(descend, n, (n, 0.4, aggregation)):
        assert torch.equal(own_z, virtual[0][0]) and torch.equal(own_v, virtual[0][1])


class Linear(nn.Module):
    """A problem's worker as a model whose loss is f_i."""

    def __init__(self, rank: int, n: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(D, dtype=torch.float64))
        problem = problem_of(n)
        self.rows, self.targets = problem.features[rank], problem.targets[rank]

    def forward(self) -> Tensor:
        return (self.rows @ self.x - self.targets).square().mean() / 2


def under_ddp(rank: int, n: int, tau: float) -> Tensor:
    model = DistributedDataParallel(Linear(rank, n))
    model.register_comm_hook(BlockSparseState(tau, block=2, model=model), block_sparse_hook)
    optimizer, path = IASGD.for_smoothness(model.parameters(), **constants_for(n, tau)), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        path.append(model.module.x.detach().clone())
    return torch.stack(path)


def test_under_the_hook_of_ddp_it_is_the_twin(ranks: RankPool) -> None:
    z, _ = twin_of(4, 0.4, first_draw=1)  # the hook counts its steps from 1
    for path in ranks.run(under_ddp, 4, (4, 0.4)):
        assert float((path - z).abs().max()) <= TOLERANCE


def test_acceleration_where_strong_growth_holds_and_not_elsewhere() -> None:
    """Exact gradients, kappa 1000: sqrt(kappa) instead of kappa. With noise at the optimum SGD with that lr wins."""
    eigenvalues = torch.logspace(-3, 0, D, dtype=torch.float64)

    def distance(make: Any, steps: int, noise: float) -> float:
        x, generator = nn.Parameter(torch.ones(D, dtype=torch.float64)), torch.Generator().manual_seed(0)
        optimizer, tail = make([x]), []
        for _ in range(steps):
            x.grad = eigenvalues * x.detach() + noise * torch.randn(D, generator=generator, dtype=torch.float64)
            optimizer.step()
            tail.append(float(x.detach().square().sum()))
        return sum(tail[-100:]) / 100

    def accelerated(params: Any) -> IASGD:
        return IASGD.for_smoothness(params, L=1.0, mu=1e-3)

    def plain(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    assert distance(accelerated, 500, 0.0) < 1e-4 * distance(plain, 500, 0.0)
    assert distance(accelerated, 3000, 0.1) > 2 * distance(plain, 3000, 0.1)


# -- what torch allows -----------------------------------------------------------------------------------------------


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def make(params: Any, **options: Any) -> IASGD:
    return IASGD(params, **{"lr": 0.05, "mu": 0.5, "growth": 2.0, **options})


def backward(model: nn.Module, seed: int) -> Tensor:
    batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
    loss = model(batch.to(next(model.parameters()).dtype)).square().mean()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_copies_and_checkpoints_go_on_exactly(dtype: torch.dtype) -> None:
    model = model_of(dtype=dtype)
    optimizer = make(model.parameters())
    start = flat(model)
    train(model, optimizer, range(3))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = model_of(seed=1, dtype=dtype)
    resumed = make(other.parameters(), lr=9e-9, mu=1.0)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert all(set(entry) == {"v"} for entry in saved["optimizer"]["state"].values())
    expected = train(model, optimizer, range(3, 6))
    assert not torch.equal(expected, start)
    for twin_model, twin in [*copies, (other, resumed)]:
        assert torch.equal(train(twin_model, twin, range(3, 6)), expected)


def test_closures_run_once_with_gradients_enabled() -> None:
    ours, plain = model_of(), model_of()
    optimizer, calls = make(ours.parameters()), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(ours, 0)

    with torch.no_grad():
        loss = optimizer.step(closure)
    train(plain, make(plain.parameters()), range(1))
    assert calls == [True] and isinstance(loss, Tensor) and torch.equal(flat(ours), flat(plain))


def test_added_groups_train_with_their_own_options() -> None:
    model, late = model_of(), nn.Parameter(torch.ones(3))
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": [late], "lr": 0.1, "mu": 1.0})
    c = nesterov_constants(1 / (2.0 * 0.1), 1.0, 2.0)
    z = v = torch.ones(3)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        late.grad = g = torch.randn(3, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        w, v = z - c.eta * g, c.beta * v + (1 - c.beta) * z - c.gamma * c.eta * g
        z = c.alpha * v + (1 - c.alpha) * w
    assert torch.allclose(late.detach(), z, atol=1e-6)
    with pytest.raises(ConfigError, match="mu: must be a finite number above 0, got 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "mu": 0})
    assert len(optimizer.param_groups) == 2


def test_parameters_without_a_gradient_stay_and_have_no_state() -> None:
    model, idle = model_of(), nn.Parameter(torch.ones(3))
    optimizer = make([*model.parameters(), idle])
    train(model, optimizer, range(2))
    assert idle.tolist() == [1.0] * 3 and idle not in optimizer.state


def test_schedules_reach_the_constants_and_lr_0_moves_nothing() -> None:
    model = model_of()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    start = flat(model)
    assert torch.equal(train(model, optimizer, range(1)), start)
    scheduler.step()
    other = model_of()
    assert torch.equal(train(model, optimizer, range(2)), train(other, make(other.parameters(), lr=0.025), range(2)))


def test_grad_scaler_and_distributed_checkpoint_and_hooks() -> None:
    results = []
    for scaled in (True, False):
        model = model_of()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for step in range(3):
            optimizer.zero_grad()
            batch = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(flat(model))
    assert torch.equal(*results)  # a scale that is a power of two is exact
    saved, target = copy.deepcopy(get_optimizer_state_dict(model, optimizer)), model_of(seed=1)
    second = make(target.parameters())
    set_optimizer_state_dict(target, second, saved)
    target.load_state_dict(model.state_dict())
    assert torch.equal(train(target, second, range(3, 5)), train(model, optimizer, range(3, 5)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr: must be a finite number from 0 on, got -1.0"),
        ({"mu": 0.0}, "mu: must be a finite number above 0, got 0.0"),
        ({"mu": float("nan")}, "mu: must be a finite number above 0, got nan"),
        ({"growth": 0.5}, "growth: must be a finite number from 1 on, got 0.5"),
        (
            {"lr": 5.0},
            "lr: must be at most growth / mu = 4, got 5.0; 1 / (growth L) is never more than that",
        ),
    ],
)
def test_refusals(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make([nn.Parameter(torch.ones(1))], **options)
    assert str(error.value) == sentence


def test_sparse_gradients_and_an_l_below_mu_are_refused() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="IASGD does not take sparse gradients"):
        make(embedding.parameters()).step()
    with pytest.raises(ConfigError, match=r"L: must be finite and at least mu = 2.0, got 1.0"):
        IASGD.for_smoothness([nn.Parameter(torch.ones(1))], L=1.0, mu=2.0)
