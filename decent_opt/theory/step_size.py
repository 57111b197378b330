"""The consensus step size gamma while training: a guard that notices when it is too large, and a rule that tunes it.

Both look at the error e_r = ||x - xhat||^2 of the public copies, taken once a round before the message is encoded.
Below the edge of stability e is fed by the local steps, about lr^2 of it in each round, and forgotten at a fixed rate:
it settles. Above the edge one mode of (X, Xhat) grows like a power c^r, c > 1. At first nothing shows, because that
mode starts far below the others, which shrink (top-10 % on a ring: hundreds of rounds); then log e rises on a line.

    healthy:    log e rises as the copies fall behind at the start, or with lr; it bends and becomes flat
    unstable:   log e rises, and keeps its slope

Plain arithmetic on floats: no tensors and no torch.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import ClassVar

BLOCK = 8
"""Rounds in a block. Errors are averaged over blocks, so that one odd round says nothing."""


class GrowthGuard:
    """Tells exponential growth of the error from all other behaviour.

    A window of 4, 8, 16 or 32 blocks is cut into quarters with mean levels q1..q4 of log e. It shows growth if

        q4 - q1 >= log 6                        the error has grown sixfold at least
        q3 - q2, q4 - q3 >= 0.8 (q2 - q1)       and has not slowed down
        q2 - q1 >= 0.5 (q3 - q2), 0.5 (q4 - q3) nor jumped
        e >= ||x||^2 / 100                      and begins to matter; 1e-6 ||x||^2 for the two longer windows

    A power r^a whose window has grown sixfold has slowed down below 0.8 for all a <= 4, and so has any error that
    settles; c^r keeps 1. Short windows notice fast growth, the longest one 0.9 % per round. A small error harms nobody
    and may jump tenfold, but not steadily over 128 rounds. Since e follows lr^2, the history begins anew when the
    learning rate rises, or falls by more than a tenth. Besides, copies that are farther from x than 0 is,
    e > ||x||^2, for four blocks are of no use, whatever the slope.

    The history is a few dozen floats and is not meant to be saved: after a resume it takes four blocks to judge again.
    """

    SMALL: ClassVar = {1: 1e-2, 2: 1e-2, 4: 1e-6, 8: 1e-6}  # blocks in a quarter -> least e / ||x||^2 that counts
    FOLD = 6.0
    KEPT, BEFORE = 0.8, 0.5

    def __init__(self) -> None:
        self._levels: deque[float] = deque(maxlen=4 * max(self.SMALL))
        self._block: list[float] = []
        self._lr = 0.0
        self._peak = 0.0
        self._useless = 0

    def update(self, error: float, scale: float, lr: float) -> str | None:
        """One round: e, ||x||^2 and the sum of the learning rates; return what is wrong, if anything is."""
        if not (math.isfinite(error) and math.isfinite(scale)):
            return f"||x - xhat||^2 is {error:g} and ||x||^2 is {scale:g}"
        self._peak = max(self._peak, scale)
        self._useless = self._useless + 1 if error > self._peak else 0
        if self._useless >= 4 * BLOCK:
            return f"||x - xhat||^2 = {error:.3g} has been above ||x||^2 = {scale:.3g} for {self._useless} rounds"
        if not 0.9 * self._lr <= lr <= self._lr or error <= 0.0:
            self._levels.clear()
            self._block.clear()
        self._lr = lr
        if error > 0.0:
            self._block.append(math.log(error))
        if len(self._block) < BLOCK:
            return None
        self._levels.append(sum(self._block) / BLOCK)
        self._block.clear()
        growths = (self._growth(quarter) for quarter, small in self.SMALL.items() if error >= small * scale)
        return next(filter(None, growths), None)

    def _growth(self, quarter: int) -> str | None:
        if len(self._levels) < 4 * quarter:
            return None
        last = list(self._levels)[-4 * quarter :]
        q = [sum(last[i : i + quarter]) / quarter for i in range(0, 4 * quarter, quarter)]
        first, *later = (after - before for before, after in pairwise(q))
        steady = min(later) >= self.KEPT * first and first >= self.BEFORE * max(later)
        if q[3] - q[0] < math.log(self.FOLD) or not steady:
            return None
        return f"||x - xhat||^2 has grown {math.exp(q[3] - q[0]):.3g}-fold in {4 * quarter * BLOCK} rounds, steadily"


class AutoGamma:
    """Raises gamma while the error stays where it is, and halves it when the error grows.

    Called after every block with means over its rounds and over all workers, so that all take the same decision. With
    y = log e, log(1e-6 ||x||^2) at least (below that nothing is worth a reaction), and `usual` following y slowly:

        y > usual + log 4       the error has grown fourfold: gamma <- gamma / 2, which is also the ceiling from now on
        y <= last + log 1.05    quiet: gamma <- 1.25 gamma, up to the ceiling; but not while e > ||x||^2 / 10
        else                    wait

    `usual` rises by 1 % per block at most, so that a slow change of the gradients is no growth, and falls by 10 % at
    most, so that it is no growth when the error comes back to where it was. The ceiling rises by 2 % per block: what
    was found in a bad moment is tried again. A rising learning rate makes the error rise, so nothing is decided then.
    Where the copies start from x, at the beginning and after an exact average, the error shoots up while the workers
    part: nothing is compared until the first quiet block, except with ||x||^2. The start is the floor and has to be
    safe.

    Args:
        start: the first and the smallest gamma.
        state: `state` of another object, to go on exactly where it stopped.
    """

    RAISE = 1.25
    FOLD = math.log(4.0)
    QUIET = math.log(1.05)
    SMALL, LARGE = 1e-6, 0.1
    UP, DOWN = math.log(1.01), math.log(1.1)

    def __init__(self, start: float, state: str | None = None) -> None:
        self.start = start
        self.gamma, self.ceiling, self.usual, self.last, self.lr = start, 1.0, math.inf, -math.inf, 0.0
        if state is not None:
            self.gamma, self.ceiling, self.usual, self.last, self.lr = map(float, state.split(";"))

    @property
    def state(self) -> str:
        """All that must survive, as text: gamma;ceiling;usual;last;lr."""
        return ";".join(map(repr, (self.gamma, self.ceiling, self.usual, self.last, self.lr)))

    def update(self, error: float, scale: float, lr: float) -> float:
        """One block: mean e, mean ||x||^2, and the sum of the learning rates; return gamma of the next block."""
        finite = math.isfinite(error) and math.isfinite(scale)
        y = math.log(max(error, self.SMALL * scale, 1e-300)) if finite else math.inf
        rising, self.lr = lr > self.lr, lr
        quiet = y <= self.last + self.QUIET and not rising
        self.last, self.ceiling = y, min(1.0, 1.02 * self.ceiling)
        starting = self.usual == math.inf
        if (starting and quiet) or (not starting and (rising or self.gamma == self.start)):
            self.usual = y
        elif not starting:
            self.usual = min(max(y, self.usual - self.DOWN), self.usual + self.UP)
        if not finite or y > self.usual + self.FOLD or (starting and error > scale):
            self.gamma = self.ceiling = max(self.start, self.gamma / 2)
            self.usual = y
        elif quiet and error < self.LARGE * scale:
            self.gamma = max(self.start, min(self.RAISE * self.gamma, self.ceiling))
        return self.gamma

    def restart(self) -> None:
        """The copies have restarted from x: what comes now cannot be compared with what was."""
        self.usual = math.inf
