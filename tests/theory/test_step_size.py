"""The guard and the automatic gamma: on made-up errors, and on those of the twin, stable and not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_opt.simulation import SGDM, CompressedTwin
from decent_opt.theory import AutoGamma, GrowthGuard, choco_gamma
from decent_opt.theory.step_size import BLOCK
from decent_opt.topology import make_topology

RING = make_topology("ring", 8)
ROUNDS = 800


def alarm(errors, scales=None, lrs=None) -> int | None:
    """The round in which the guard speaks, counted from 1."""
    guard = GrowthGuard()
    for r, error in enumerate(errors):
        if guard.update(error, 1.0 if scales is None else scales[r], 0.1 if lrs is None else lrs[r]):
            return r + 1
    return None


# -- made-up errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("growth", "within"), [(1.012, 400), (1.03, 150), (1.1, 60), (1.5, 40)])
def test_growth_is_noticed_soon_after_it_shows_and_long_before_the_end(growth, within, noise) -> None:
    rng = np.random.default_rng(0)
    visible = int(math.log(100) / math.log(growth))  # where the growing part equals the other
    rounds = range(visible + within)
    errors = [(1e-4 + 1e-6 * growth**r) * math.exp(noise * rng.standard_normal()) for r in rounds]
    found = alarm(errors)
    assert found is not None and found > visible


@pytest.mark.parametrize(("power", "noise"), [(0.5, 0.3), (1, 0.3), (2, 0.0), (2, 0.3), (3, 0.0), (4, 0.0)])
def test_powers_of_time_are_no_growth(power, noise) -> None:
    """Copies that are left behind at the start of training."""
    rng = np.random.default_rng(0)
    errors = [0.9 * ((r + 1) / ROUNDS) ** power * math.exp(noise * rng.standard_normal()) for r in range(ROUNDS)]
    assert alarm(errors, scales=[2.0] * ROUNDS) is None


@pytest.mark.parametrize("rounds", [3, 10, 30, 100, 300])
def test_an_error_that_settles_is_no_growth(rounds) -> None:
    assert alarm([0.5 * (1 - math.exp(-(r + 1) / rounds)) ** 2 for r in range(ROUNDS)]) is None


def test_a_learning_rate_warmup_and_restarts_are_no_growth() -> None:
    for peak in (20, 100, 400):
        lrs = [0.1 * min(1.0, (r % 500 + 1) / peak) for r in range(1000)]
        assert alarm([10 * lr**2 for lr in lrs], lrs=lrs) is None


def test_an_odd_round_is_no_growth() -> None:
    errors = [0.02] * ROUNDS
    errors[100] = errors[200] = errors[201] = errors[202] = 0.9
    assert alarm(errors) is None


def test_what_is_not_finite_or_farther_away_than_zero_is_reported() -> None:
    assert alarm([0.1, math.nan]) == 2
    assert alarm([0.1, math.inf]) == 2
    assert alarm([0.1, 0.1], scales=[1.0, math.inf]) == 2
    assert alarm([1.1] * 100) == 4 * BLOCK
    assert alarm([1.1, 0.9] * 100) is None
    assert alarm([0.0] * 100) is None
    assert "||x - xhat||^2 is nan" in GrowthGuard().update(math.nan, 1.0, 0.1)


# -- errors of the twin --------------------------------------------------------------------------------------------


def sign(worker: int, x: Tensor, round: int) -> Tensor:
    return x.abs().mean() * x.sign()


def top(share: float):
    def operator(worker: int, x: Tensor, round: int) -> Tensor:
        chosen = x.abs().topk(round_up(share * len(x))).indices
        return torch.zeros_like(x).index_copy_(0, chosen, x[chosen])

    return operator


def blocks(worker: int, x: Tensor, round: int) -> Tensor:
    """An eighth of the blocks of 8."""
    count = len(x) // 8
    chosen = np.random.default_rng((worker, round)).permutation(count)[: round_up(count / 8)]
    kept = torch.zeros_like(x)
    kept.view(count, 8)[chosen] = x.view(count, 8)[chosen]
    return kept


def round_up(number: float) -> int:
    return math.ceil(number - 1e-9)


OPERATORS = {"sign": sign, "top 10 %": top(0.1), "top 1 %": top(0.01), "blocks 1/8": blocks}
DELTAS = {"sign": 2 / math.pi, "top 10 %": 0.1, "top 1 %": 0.01, "blocks 1/8": 1 / 8}


def twin_of(operator, gamma: float, order: str = "paper", *, training: bool = True, dimension: int = 200, start=None):
    """A ring of 8. Training: noisy quadratics of other diagonal curvature on each worker, 2 steps in a round."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.standard_normal((8, dimension)))
    curvature = torch.from_numpy(np.stack([rng.permutation(np.linspace(0.1, 1, dimension)) for _ in range(8)]))
    noise = torch.zeros_like(values)
    rule = SGDM(0.005, momentum=0.9)

    def gradient(worker: int, x: Tensor, step: int) -> Tensor:
        if not training:
            return torch.zeros_like(x)
        if worker == 0:
            noise.copy_(torch.from_numpy(np.random.default_rng((1, step)).standard_normal(noise.shape)))
        return curvature[worker] * (x - values[worker]) + 0.5 * noise[worker]

    optimum = (curvature * values).sum(dim=0) / curvature.sum(dim=0)
    x0 = (optimum if start is None else torch.full_like(optimum, start)) if training else values
    twin = CompressedTwin(x0, gradient, rule, RING, operator, gamma=gamma, order=order, period=2 if training else 1)
    if not training:
        twin.restart(torch.zeros_like(values))
    return twin


def one_round(twin: CompressedTwin) -> tuple[float, float]:
    """Its error, and the scale of the parameters."""
    for _ in range(twin.segments[0][1]):
        twin.step()
    return twin.error, float(twin.X.square().sum(dim=1).mean())


def watch(twin: CompressedTwin, rounds: int, lr=None) -> tuple[int | None, float]:
    """The round in which the guard speaks, if it does, and e / ||x||^2 then or at the end."""
    guard = GrowthGuard()
    for r in range(rounds):
        if lr is not None:
            twin.rule.lr = lr(r)
        error, scale = one_round(twin)
        if guard.update(error, scale, twin.rule.lr):
            return r + 1, error / scale
    return None, error / scale


@pytest.mark.parametrize("order", ["paper", "fresh"])
def test_the_trap_is_noticed_while_the_error_is_still_tiny(order) -> None:
    """Top-10 % at 0.35: the error falls to 1e-7 of its start within 200 to 300 rounds, then grows by 1.5 % a round."""
    found, relative = watch(twin_of(top(0.1), 0.35, order, training=False), 1600)
    assert 250 < found < 700
    assert relative < 1e-3


@pytest.mark.parametrize(
    ("name", "gamma", "within"),
    [("top 10 %", 0.8, 150), ("top 10 %", 1.0, 100), ("top 1 %", 0.5, 150), ("blocks 1/8", 0.4, 150)],
)
@pytest.mark.parametrize("order", ["paper", "fresh"])
def test_training_beyond_the_edge_is_noticed(order, name, gamma, within) -> None:
    found, _ = watch(twin_of(OPERATORS[name], gamma, order), within)
    assert found is not None


STABLE = [("sign", 0.4), ("sign", 1.0), ("top 10 %", 0.15), ("top 1 %", 0.03), ("blocks 1/8", 0.0625)]


@pytest.mark.parametrize(("name", "gamma"), STABLE)
def test_training_below_the_edge_gives_no_alarm(name, gamma) -> None:
    operator = OPERATORS[name]
    for start in (None, 3.0):
        assert watch(twin_of(operator, gamma, start=start), 300)[0] is None
    assert watch(twin_of(operator, gamma), 300, lambda r: 0.01 * min(1, (r + 1) / 150) + 1e-9)[0] is None
    assert watch(twin_of(operator, gamma), 300, lambda r: 0.005 * (1 + math.cos(math.pi * r / 300)) + 1e-9)[0] is None
    assert watch(twin_of(operator, gamma), 300, lambda r: 0.01 * 0.1 ** (r // 150))[0] is None


# -- automatic gamma -----------------------------------------------------------------------------------------------


def test_gamma_rises_while_nothing_happens_and_stops_at_one() -> None:
    auto = AutoGamma(0.1)
    gammas = [auto.update(0.01, 1.0, 0.1) for _ in range(20)]
    assert gammas[0] == 0.1  # the first learning rate is a rise from 0
    assert gammas[1:4] == pytest.approx([0.125, 0.15625, 0.1953125])
    assert gammas[-1] == 1.0


def test_gamma_is_halved_when_the_error_has_grown_fourfold_and_remembers_the_ceiling() -> None:
    auto = AutoGamma(0.1)
    for _ in range(7):
        high = auto.update(0.01, 1.0, 0.1)
    assert [auto.update(e, 1.0, 0.1) for e in (0.02, 0.03, 0.05)] == [high, high, high / 2]
    later = [auto.update(0.01, 1.0, 0.1) for _ in range(10)]
    assert max(later) == pytest.approx(high / 2 * 1.02**10)
    assert auto.update(math.nan, 1.0, 0.1) == later[-1] / 2
    for _ in range(10):
        lowest = auto.update(math.inf, math.inf, 0.1)
    assert lowest == 0.1


def test_gamma_waits_while_the_error_or_the_learning_rate_rises_and_where_the_error_is_large() -> None:
    auto = AutoGamma(0.1)
    assert {auto.update(0.01 * 1.2**r, 1.0, 0.1) for r in range(10)} == {0.1}
    auto = AutoGamma(0.1)
    assert {auto.update(0.01 * r**2, 1.0, 0.01 * r) for r in range(1, 10)} == {0.1}
    auto = AutoGamma(0.1)
    assert {auto.update(0.2, 1.0, 0.1) for _ in range(10)} == {0.1}


def test_its_state_is_a_text_that_goes_on_exactly() -> None:
    rng = np.random.default_rng(3)
    errors = (0.01 * np.exp(rng.standard_normal(100).cumsum() / 2)).tolist()
    one, other = AutoGamma(0.01), AutoGamma(0.01)
    for error in errors:
        other = AutoGamma(0.01, other.state)
        assert one.update(error, 1.0, 0.1) == other.update(error, 1.0, 0.1)
        assert one.state == other.state
    assert len(AutoGamma(0.01, AutoGamma(0.01).state).state) < 100


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize(("training", "order"), [(True, "paper"), (True, "fresh"), (False, "paper")])
def test_it_finds_a_gamma_that_is_stable_and_mixes_far_better_than_the_theorys(training, order, name) -> None:
    start = choco_gamma(RING, DELTAS[name])
    careful, twin = (twin_of(OPERATORS[name], start, order, training=training) for _ in range(2))
    auto, rounds = AutoGamma(start), 1000 if training else 1500
    highest, ratios, distances, theirs = start, [], [], []
    for r in range(rounds // BLOCK):
        block = [one_round(twin) for _ in range(BLOCK)]
        error, scale = np.mean(block, axis=0).tolist()
        twin.gamma = auto.update(error, scale, twin.rule.lr)
        highest = max(highest, twin.gamma)
        ratios.append(error / scale)
        distances.append(twin.consensus_error)
        if r >= 30 or not training:
            for _ in range(BLOCK):
                one_round(careful)
            theirs.append(careful.consensus_error)
    assert highest >= 10 * start
    if training or name != "sign":  # signs of what nearly vanishes are erratic, so gamma goes up and down
        assert twin.gamma >= 10 * start
    assert max(ratios[30:]) < 1.0
    assert np.median(distances[-12:]) < np.median(theirs[-12:]) / 2
