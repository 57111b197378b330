"""What m/n blocks cost and save: the tables of docs/blocks_theory.md, from the matrix twins, in a few minutes.

    python benchmarks/mn_blocks.py [--plot benchmarks/results/mn_blocks.svg] [--seeds 3] [--only ibcd isega ...]

n workers each send a share tau of the d coordinates of their gradient to a master. "Iterations" are steps until
||x - x*||^2 has fallen to 1e-8 of its start, "-" means not within the limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from decent_opt.simulation import (
    IASGD,
    IBCD,
    ISAGA,
    ISEGA,
    ISGD,
    BlockTwin,
    ErrorFeedback,
    FiniteSum,
    LeastSquares,
    Logistic,
    SharedISAGA,
    breast_cancer,
    coordinate_mask,
    everything,
    least_squares,
    logistic,
    one_sample,
    split,
    steps_until,
)
from decent_opt.theory import (
    ibcd_slowdown,
    ibcd_step,
    isaga_step,
    isega_practical_step,
    isega_step,
    isgd_step,
    nesterov_constants,
    sparsified_dissimilarity,
    sparsified_growth,
)

CONSOLE = Console(width=140)
RESULTS = Path(__file__).parent / "results"
Curve = dict[float, list[float]]


def zeros(problem: FiniteSum) -> torch.Tensor:
    return torch.zeros(problem.features.shape[2], dtype=torch.float64)


def mask(
    problem: FiniteSum, kept: int, masks: Any = "independent", seed: int = 0
) -> Callable[[int, int], torch.Tensor]:
    d = problem.features.shape[2]
    return everything(d) if kept == d else coordinate_mask(problem.workers, d, kept, masks=masks, seed=seed)


def iterations(twin: BlockTwin, problem: FiniteSum, limit: int = 60_000) -> int | None:
    return steps_until(twin, problem.optimum, below=1e-8, limit=limit)


def left(twin: BlockTwin, problem: FiniteSum, steps: int) -> float:
    """||x - x*||^2 / ||x_0 - x*||^2 after so many more steps."""
    start = (twin.x - problem.optimum).square().sum()
    for _ in range(steps):
        twin.step()
    return float((twin.x - problem.optimum).square().sum() / start)


def ratio(a: int | None, b: int | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}"


def ibcd(problem: FiniteSum, kept: int, seed: int = 0, masks: str = "independent", mean_L: bool = False) -> int:
    """Iterations of IBCD; one mask for all leaves the step at 1 / L."""
    n, d = problem.features.shape[0], problem.features.shape[2]
    lr = ibcd_step(problem.L, n, kept / d, problem.mean_L if mean_L else None) if masks != "shared" else 1 / problem.L
    twin = IBCD(zeros(problem), problem.gradients, n, mask(problem, kept, masks, seed), lr=lr)
    found = iterations(twin, problem, limit=200_000)
    assert found is not None
    return found


# -- the tables ------------------------------------------------------------------------------------------------------


def over_tau(seeds: int) -> tuple[Curve, Curve]:
    """IBCD at n = d = m = 100: ratios to gradient descent, own masks and one for all."""
    problems = [least_squares(100, 6, 100, seed=seed) for seed in range(seeds)]
    table = Table(
        "tau", "iterations", "ratio", "smallest, largest", "predicted", "PermK", "shared mask", "numbers sent",
        "saving", "vs GD at 1/L_f", "predicted",
        title=f"IBCD, consistent least squares, n = d = m = 100, {seeds} problems",
    )  # fmt: skip
    dense, smooth = [ibcd(p, 100) for p in problems], [ibcd(p, 100, mean_L=True) for p in problems]
    own, shared = {1.0: [1.0] * seeds}, {1.0: [1.0]}
    spread = mean(p.L / p.mean_L for p in problems)
    for kept in (100, 50, 20, 10, 5, 2, 1):
        tau = kept / 100
        steps = [ibcd(p, kept, seed) for seed, p in enumerate(problems)]
        own[tau] = [s / g for s, g in zip(steps, dense, strict=True)]
        shared[tau] = [ibcd(problems[0], kept, masks="shared") / dense[0]]
        perm = [ibcd(p, kept, seed, "permutation") / g for seed, (p, g) in enumerate(zip(problems, dense, strict=True))]
        fair = [ibcd(p, kept, seed, mean_L=True) / g for seed, (p, g) in enumerate(zip(problems, smooth, strict=True))]
        table.add_row(
            f"{tau:g}", f"{mean(steps):.0f}", f"{mean(own[tau]):.2f}", f"{min(own[tau]):.2f}, {max(own[tau]):.2f}",
            f"{ibcd_slowdown(100, tau):.2f}", f"{mean(perm):.2f}", f"{shared[tau][0]:.1f}", f"{mean(steps) * kept:.0f}",
            f"{mean(dense) * 100 / mean(steps) / kept:.1f}", f"{mean(fair):.1f}",
            f"{ibcd_slowdown(100, tau, spread):.1f}",
        )  # fmt: skip
    CONSOLE.print(table)
    return own, shared


def over_n(seeds: int) -> Curve:
    """IBCD with tau = 1/n at d = m = 128 and 512 samples in all."""
    table = Table(
        "n", "iterations", "GD", "ratio", "smallest, largest", "2 - 1/n", title="IBCD, tau = 1/n, d = m = 128"
    )
    ratios: Curve = {}
    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        problems = [least_squares(n, 512 // n, 128, seed=seed) for seed in range(seeds)]
        steps, dense = [ibcd(p, 128 // n, seed) for seed, p in enumerate(problems)], [ibcd(p, 128) for p in problems]
        ratios[n] = [s / g for s, g in zip(steps, dense, strict=True)]
        table.add_row(
            str(n), f"{mean(steps):.0f}", f"{mean(dense):.0f}", f"{mean(ratios[n]):.2f}",
            f"{min(ratios[n]):.2f}, {max(ratios[n]):.2f}", f"{2 - 1 / n:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)
    return ratios


def isega() -> None:
    """l2-logistic regression on breast_cancer: gradient descent with 1 / L against ISEGA."""
    table = Table(
        "data", "n", "tau", "kappa", "GD", "1/(L(1+omega/n))", "ratio", "PermK", "ratio", "proved step", "ratio",
        "saving", "IBCD stalls at", title="ISEGA, l2-logistic regression",
    )  # fmt: skip
    for by, n, kept, kappa in (
        ("iid", 20, 2, 100), ("label", 20, 2, 100), ("iid", 20, 2, 1000), ("label", 20, 2, 1000), ("label", 30, 1, 30),
    ):  # fmt: skip
        problem, tau = logistic(*split(*breast_cancer(), n, by=by), kappa), kept / 30  # type: ignore[arg-type]
        x0, g = zeros(problem), problem.gradients
        dense = iterations(IBCD(x0, g, n, everything(30), lr=1 / problem.L), problem)
        practical, proved = isega_practical_step(problem.L, n, tau), isega_step(problem.L, n, tau)
        runs = [
            iterations(ISEGA(x0, g, n, mask(problem, kept, masks), tau=tau, lr=lr), problem)
            for masks, lr in (("independent", practical), ("permutation", practical), ("independent", proved))
        ]
        stall = left(IBCD(x0, g, n, mask(problem, kept), lr=ibcd_step(problem.L, n, tau)), problem, 5000)
        cells = [cell for run in runs for cell in (str(run), ratio(run, dense))]
        saving = "-" if dense is None or runs[0] is None else f"{dense / runs[0] / tau:.1f}"
        table.add_row(by, str(n), f"1/{1 / tau:.0f}", f"{kappa}", str(dense), *cells, saving, f"{stall:.1e}")
    CONSOLE.print(table)


def isaga() -> None:
    """SAGA's tables: one for all, or one each; few or many samples for the condition number."""
    table = Table(
        "problem", "kappa", "table", "one worker", "n, all sent", "n, tau = 1/n", "ratio", title="ISAGA, n = 15"
    )
    n, kept = 15, 2
    features, labels = split(*breast_cancer(), n)
    for kappa in (50, 5000):
        problem = Logistic(features, labels, Logistic(features, labels).sample_L / (kappa - 1))
        alone = Logistic(features.reshape(1, -1, 30), labels.reshape(1, -1), problem.ridge)
        runs = [
            iterations(SharedISAGA(zeros(p), p, mask(p, k), lr=isaga_step(p.sample_L, p.workers, k / 30)), p, 400_000)
            for p, k in ((alone, 30), (problem, 30), (problem, kept))
        ]
        table.add_row("logistic, N = 555", str(kappa), "shared", *map(str, runs), ratio(runs[2], runs[1]))
    for samples in (40, 200):
        own = least_squares(n, samples, 30, noise=1.0, orthogonal=True)
        for refresh in ("full", "masked"):
            pair = []
            for k in (30, kept):
                lr = isaga_step(own.sample_L, n, k / 30)
                twin = ISAGA(zeros(own), own, mask(own, k), lr=lr, refresh=refresh)
                pair.append(iterations(twin, own))
            name = f"least squares, l = {samples}"
            kappa_text = f"{own.sample_L / own.mu:.0f}"
            table.add_row(name, kappa_text, f"own, {refresh}", "", *map(str, pair), ratio(pair[1], pair[0]))
    CONSOLE.print(table)


def sample_growth(problem: LeastSquares) -> float:
    """max_x E||v||^2 / ||grad f||^2 of one random sample's gradient, where the problem is consistent."""
    rows = problem.features.flatten(0, 1)
    second = (rows.T * rows.square().sum(dim=1)) @ rows / len(rows)
    inverse = torch.linalg.inv(problem.hessian(zeros(problem)))
    return float(torch.linalg.eigvalsh(inverse @ second @ inverse).max())


def iasgd() -> None:
    """Acceleration: with the workers' whole gradients, and with those of single samples."""
    table = Table(
        "gradients", "l", "kappa", "growth", "GD", "ISGD", "IASGD", "ISGD / IASGD", title="IASGD, n = d = 20, tau = 1/n"
    )
    n = 20
    for exact, samples, kappa in ((True, 500, 100), (True, 500, 1000), (True, 60, 100), (False, 500, 10)):
        p = least_squares(n, samples, n, kappa=kappa)
        oracle = p.gradients if exact else one_sample(p, shared=True)
        growth = (
            sparsified_dissimilarity(p.dissimilarity, n, 1 / n)
            if exact
            else sparsified_growth(sample_growth(p), n, 1 / n)
        )
        lr = ibcd_step(p.L, n, 1 / n, p.mean_L) if exact else isgd_step(p.sample_L, n, 1 / n)
        constants = nesterov_constants(p.mean_L, p.mu, growth)
        dense = iterations(IBCD(zeros(p), p.gradients, n, everything(n), lr=1 / p.mean_L), p)
        plain = iterations(ISGD(zeros(p), oracle, n, mask(p, 1), lr=lr), p)
        fast = iterations(IASGD(zeros(p), oracle, n, mask(p, 1), tau=1 / n, constants=constants), p)
        what = "of f_i" if exact else "of one sample"
        cells = [what, str(samples), str(kappa), f"{growth:.1f}", str(dense), str(plain), str(fast), ratio(plain, fast)]
        table.add_row(*cells)
    CONSOLE.print(table)


def noise() -> None:
    """What is left of ||x - x*||^2 at equal speed lr tau, stochastic gradients of noisy targets."""
    n = d = 10
    problem, speed = least_squares(n, 200, d, noise=1.0, seed=3), 0.01
    oracle = one_sample(problem, shared=True)
    table = Table(
        "method", "tau", "mean ||x - x*||^2", "of all sent", title="Noise floor at lr tau = 0.01, n = d = m = 10"
    )
    twins: list[tuple[str, str, BlockTwin]] = []
    for masks, kept in (("independent", d), ("independent", 5), ("independent", 1), ("permutation", 1), ("shared", 1)):
        twin = ISGD(problem.optimum, oracle, n, mask(problem, kept, masks), lr=speed * d / kept)
        twins.append((f"ISGD, {masks}", f"{kept / d:g}", twin))
    twins.append(("error feedback", "0.1", ErrorFeedback(problem.optimum, oracle, n, mask(problem, 1), lr=speed)))
    floors: list[float] = []
    for name, tau, some in twins:
        errors = []
        for _ in range(10_000):
            some.step()
            errors.append(float((some.x - problem.optimum).square().sum()))
        floors.append(mean(errors[1000:]))
        table.add_row(name, tau, f"{floors[-1]:.2e}", f"{floors[-1] / floors[0]:.2f}")
    CONSOLE.print(table)


def plot(own: Curve, shared: Curve, ratios: Curve, path: Path) -> None:
    """Both curves of IBCD: over tau at n = 100, and over n at tau = 1/n."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    over, across = figure.subplots(1, 2)
    taus, ns = sorted(own), sorted(ratios)
    for axes, keys, curve, predicted in (
        (over, taus, own, [ibcd_slowdown(100, tau) for tau in taus]),
        (across, ns, ratios, [2 - 1 / n for n in ns]),
    ):
        axes.plot(keys, predicted, "k--", label="predicted")
        axes.plot(keys, [mean(curve[key]) for key in keys], "o-", label="measured, own masks")
        axes.fill_between(keys, [min(curve[key]) for key in keys], [max(curve[key]) for key in keys], alpha=0.2)
        axes.set(xscale="log", ylabel="iterations, of gradient descent's")
    over.plot(taus, [shared[tau][0] for tau in taus], "s-", label="measured, one mask for all")
    over.set(yscale="log", xlabel="tau", title="IBCD, n = m = 100")
    across.set(xlabel="n", title="IBCD, tau = 1/n, m = 128", ylim=(0.9, 2.6))
    over.legend()
    across.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    CONSOLE.print(f"plotted {path}")


def main() -> None:
    others = {"isega": isega, "isaga": isaga, "iasgd": iasgd, "noise": noise}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=RESULTS / "mn_blocks.svg", help="file for the curves of IBCD")
    parser.add_argument("--seeds", type=int, default=3, help="problems to average over in IBCD")
    parser.add_argument("--only", nargs="+", choices=["ibcd", *others], default=["ibcd", *others])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    if "ibcd" in arguments.only:
        own, shared = over_tau(arguments.seeds)
        plot(own, shared, over_n(arguments.seeds), arguments.plot)
    for name, table in others.items():
        if name in arguments.only:
            table()
    CONSOLE.print(f"{time.perf_counter() - began:.0f} seconds")


if __name__ == "__main__":
    main()
