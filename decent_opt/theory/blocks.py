"""Step sizes, rates and prices of the m/n block methods: IBCD, ISGD, ISAGA, IASGD, ISEGA.

n workers, worker i sends k of m blocks, drawn for itself in every step; tau = k / m. The methods are those of "99% of
Distributed Optimization is a Waste of Time" (arXiv 1901.09437); the constants are derived anew unless a function says
otherwise, and may differ from the printed ones by small factors. Throughout

    f = (1/n) sum_i f_i is mu-strongly convex;  each f_i is convex and L-smooth;
    E||(1/n) sum_i (g_i)_{U_i}||^2 = tau^2 ||mean g||^2 + tau (1 - tau) / n * (1/n) sum_i ||g_i||^2     (*)

and everything follows from (*), which needs that the workers draw independently: with one mask for all, the second
term is n times larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

# -- IBCD: x <- x - lr/n sum_i (grad f_i(x))_{U_i} -------------------------------------------------------------------


def ibcd_step(L: float, workers: int, tau: float, mean_L: float | None = None) -> float:
    """n / (tau n L_f + (1 - tau) L), the step of IBCD.

    Proved where all f_i have their minimum at the same x*; else IBCD stalls at a distance that grows with the step.

    Args:
        L: smoothness of the least smooth f_i.
        workers: n.
        tau: k / m.
        mean_L: L_f, the smoothness of f itself, where it is known to be below L. Default: L, which makes the step
            n / (L (tau n + 1 - tau)), and 1 / L at tau = 1.
    """
    return workers / (tau * workers * (L if mean_L is None else mean_L) + (1 - tau) * L)


def ibcd_slowdown(workers: int, tau: float, spread: float = 1.0) -> float:
    """1 + L/L_f (1 - tau) / (tau n): iterations over those of gradient descent with the step 1 / L_f.

    With spread 1 that is (tau n + 1 - tau) / (tau n), or 2 - 1/n at tau = 1/n: "at most twice". A shared mask costs
    1 / tau.

    Args:
        workers: n.
        tau: k / m.
        spread: L / L_f, between 1 and n: how much smoother f is than the least smooth f_i. 1 compares with gradient
            descent that takes 1 / L.
    """
    return 1 + spread * (1 - tau) / (tau * workers)


def ibcd_rate(L: float, mu: float, workers: int, tau: float) -> float:
    """1 - mu lr tau with `ibcd_step`: E||x - x*||^2 shrinks by this factor in a step, at least."""
    return 1 - mu * tau * ibcd_step(L, workers, tau)


# -- ISGD: the same with stochastic gradients ------------------------------------------------------------------------


def isgd_step(L: float, workers: int, tau: float) -> float:
    """1 / (L (tau + 2/n)): the largest step of ISGD for which its bound holds.

    L here is that of a single sample's loss: E||v_i(x)||^2 <= 4 L D_i(x, x*) + 2 sigma^2 (expected smoothness).
    """
    return 1 / (L * (tau + 2 / workers))


def isgd_noise_floor(lr: float, mu: float, variance: float, workers: int) -> float:
    """2 lr sigma^2 / (n mu): the most that is left of E||x - x*||^2, after (1 - lr tau mu)^t has taken the rest.

    At equal speed s = lr tau this is 2 s sigma^2 / (tau n mu): with tau = 1/n the floor is that of one worker, and what
    n workers gain by averaging their noise is lost.

    Args:
        lr: at most `isgd_step`.
        mu: strong convexity of f.
        variance: sigma^2 = (1/n) sum_i E||v_i(x*)||^2; where data differ this includes ||grad f_i(x*)||^2.
        workers: n.
    """
    return 2 * lr * variance / (workers * mu)


def isgd_decreasing_steps(L: float, mu: float, workers: int, tau: float) -> Callable[[int], float]:
    """lr_t = 1 / (a + c t), a = 2 L (tau + 2/n), c = mu tau / 4: steps, t from 0, with which the noise falls as 1/t.

    c < mu tau suffices for E||x_t - x*||^2 = O(sigma^2 / (tau n mu^2 t)).
    """
    a, c = 2 / isgd_step(L, workers, tau), mu * tau / 4
    return lambda t: 1 / (a + c * t)


# -- ISAGA: a table of the samples' gradients takes the noise away ---------------------------------------------------


def isaga_step(L: float, workers: int, tau: float) -> float:
    """1 / (L (3/n + tau)): the usual step of ISAGA, L of a single sample's loss. A rule of thumb, not derived here."""
    return 1 / (L * (3 / workers + tau))


def isaga_safe_step(L: float, workers: int, tau: float) -> float:
    """1 / (L (6/n + tau)): the step for which `isaga_rate` is proved."""
    return 1 / (L * (6 / workers + tau))


def isaga_rate(mu: float, tau: float, lr: float, refresh: float) -> float:
    """1 - min(lr tau mu, rho / 2), the proved contraction per step; lr at most `isaga_safe_step`.

    Args:
        mu: strong convexity of f.
        tau: k / m.
        lr: the step size.
        refresh: rho, the probability that a number in the table is renewed in a step. N samples shared by all workers:
            about n tau / N; l samples of a worker's own: 1 / l if the whole row is renewed, tau / l if only what is
            sent. Where kappa is small next to N, this and not kappa decides, and sparsification costs 1 / tau.
    """
    return 1 - min(lr * tau * mu, refresh / 2)


# -- ISEGA: one control variate per worker ---------------------------------------------------------------------------


def isega_step(L: float, workers: int, tau: float) -> float:
    """1 / (L (1 + 6 (1 - tau) / (tau n))), for which `isega_rate` is proved; nothing is asked of grad f_i(x*)."""
    return 1 / (L * (1 + 6 * (1 - tau) / (tau * workers)))


def isega_practical_step(L: float, workers: int, tau: float) -> float:
    """1 / (L (1 + omega/n)), omega = 1/tau - 1: not proved, and it converged in every experiment. 1 / (2 L) or more
    at tau = 1/n.
    """
    return 1 / (L * (1 + (1 / tau - 1) / workers))


def isega_rate(mu: float, tau: float, lr: float) -> float:
    """max(1 - lr mu, 1 - tau/2), the proved contraction of ||x - x*||^2 plus the errors of the h_i.

    So iterations are of the order of kappa (1 + 6 (1 - tau) / (tau n)) + 2 / tau: the second term is of no account as
    long as kappa is well above n, and it is what one pays where it is not.
    """
    return max(1 - lr * mu, 1 - tau / 2)


# -- IASGD: Nesterov's acceleration under strong growth --------------------------------------------------------------


def sparsified_growth(growth: float, workers: int, tau: float) -> float:
    """1 - 1/n + rho / (tau n): E||g||^2 <= this * ||grad f||^2 for g = 1/(tau n) sum_i (v_i)_{U_i}.

    Args:
        growth: rho of the single v_i, independent with E v_i = grad f and E||v_i||^2 <= rho ||grad f||^2 (all workers
            see all data). At tau = 1/n the result is at most 1 + rho.
        workers: n.
        tau: k / m.
    """
    return 1 - 1 / workers + growth / (tau * workers)


def sparsified_dissimilarity(dissimilarity: float, workers: int, tau: float) -> float:
    """1 + B (1 - tau) / (tau n): the same constant where v_i = grad f_i exactly, by (*).

    B bounds (1/n) sum_i ||grad f_i(x)||^2 / ||grad f(x)||^2, which exists only if all f_i share their minimum, and is
    often far from 1 even then.
    """
    return 1 + dissimilarity * (1 - tau) / (tau * workers)


@dataclass(frozen=True)
class NesterovConstants:
    """One step, with g an unbiased gradient at z:  z = alpha v + (1 - alpha) w;  w <- z - eta g;
    v <- beta v + (1 - beta) z - gamma eta g.

    Attributes:
        eta: the step size.
        alpha: how much of v is in z.
        beta: what v keeps of itself.
        gamma: by how much v steps further than w.
    """

    eta: float
    alpha: float
    beta: float
    gamma: float


def nesterov_constants(L: float, mu: float, growth: float) -> NesterovConstants:
    """The constants of accelerated SGD under strong growth E||g||^2 <= rho ||grad f||^2 (Vaswani, Bach, Schmidt 2019).

    With eta = 1 / (rho L) and theta = sqrt(mu eta / rho) = sqrt(mu / L) / rho, derived anew:

        alpha = theta / (1 + theta),  beta = 1 - theta,  gamma = 1 / sqrt(mu eta rho)

    and ||v - x*||^2 + (2/mu) (f(w) - f*) shrinks by 1 - theta in a step. L is the smoothness of f. Against the rho L/mu
    iterations of plain steps that gains sqrt(L/mu) / rho: a large rho makes acceleration worthless.
    """
    eta = 1 / (growth * L)
    theta = sqrt(mu * eta / growth)
    return NesterovConstants(eta, alpha=theta / (1 + theta), beta=1 - theta, gamma=1 / sqrt(mu * eta * growth))
