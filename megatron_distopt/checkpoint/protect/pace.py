"""When a snapshot begins: at every K-th border between two steps, or as often as costs less than a
share of a step."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

#: What "auto" lets snapshots cost, of the time of all steps.
_SHARE = 0.01
#: Borders of "auto" before the trial: those of a warm-up, and those that are measured.
_NUM_WARM_UP, _NUM_MEASURED = 3, 8
AUTO = "auto"


@dataclass
class Pace:
    """Counts borders; ranks that count alike decide alike.

    "auto" measures a few steps, then makes a snapshot as a trial and sees how much longer the steps
    take until it is done on all ranks. It looks after 1, 2, 4, 8 ... steps, as all ranks look
    together. It does so twice: the first snapshot of a run also connects ranks and allocates
    memory.
    """

    every: int | str  # K, or "auto" until it is known
    _number: int = 0  # of the border
    _is_warm: bool = False  # whether there was a snapshot
    _times: list[float] = field(default_factory=list)  # of the borders, while they are measured

    @property
    def is_measuring(self) -> bool:
        return self.every == AUTO

    def next(self) -> bool:
        """Counts a border; whether ranks talk at it: a snapshot begins, or the trial may be
        done."""
        self._number += 1
        if isinstance(self.every, int):
            return self._number % self.every == 0
        self._times.append(time.perf_counter())
        since = self._number - _NUM_WARM_UP - _NUM_MEASURED - 1
        return since >= 0 and (since == 0 or (since & (since - 1)) == 0)

    @property
    def looks(self) -> bool:
        """Whether this border is one after the trial, at which it may be done."""
        return self.is_measuring and self._number > _NUM_WARM_UP + _NUM_MEASURED + 1

    def fitting(self) -> int:
        """The smallest K that this rank finds cheap enough, once it looks at a trial that is done
        by now."""
        begun = _NUM_WARM_UP + _NUM_MEASURED
        steps = [
            after - before for before, after in zip(self._times, self._times[1:], strict=False)
        ]
        if not self.looks:
            return 0
        usual = statistics.median(steps[_NUM_WARM_UP:begun])
        cost = sum(steps[begun:]) - usual * len(steps[begun:])
        return max(math.ceil(cost / (_SHARE * usual)), len(steps[begun:]))

    def choose(self, every: int) -> None:
        """Takes what suits all ranks, the second time."""
        if self._is_warm:
            self.every = every
        self._is_warm, self._number = True, 0
        self._times.clear()
