"""One reading of one contestant of train.py, on all ranks at once."""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peers.ranks import exchange, measured, now
from peers.trainers import TrainEntry, Trainer
from peers.transformer import TrainSetting, batch


@dataclass(frozen=True)
class Pace:
    """How much is run for a reading."""

    warm_up: int  # steps that are not timed
    blocks: int  # of timed steps
    steps: int  # of a block


@dataclass(frozen=True)
class TrainReading:
    """What one contestant took in one round."""

    contestant: str  # its name
    ranks: int  # data-parallel ranks
    numel: int  # elements of the model
    round: int  # repeats are rounds over all contestants
    seconds: tuple[float, ...] = ()  # of a step, by block
    cpu_seconds: float = 0.0  # of processor time of all ranks for a step
    sent_nbytes: float = 0.0  # to other ranks in a step, the mean of the ranks
    losses: tuple[float, ...] = ()  # by step, the mean of the ranks
    why_not: str = ""  # the reason, where it was not run


def losses_apart(peer: Sequence[TrainReading], ours: Sequence[TrainReading]) -> float | None:
    """The largest relative difference of any loss of the same round and step, infinite where one is not a number.

    Args:
        peer, ours: of one number of ranks.

    Returns:
        None where no round has losses of both.
    """
    losses = {reading.round: reading.losses for reading in ours}
    rounds = [zip(reading.losses, losses.get(reading.round, ()), strict=False) for reading in peer]
    found = [abs(one / other - 1.0) for pairs in rounds for one, other in pairs]
    return math.inf if any(map(math.isnan, found)) else max(found, default=None)


def read(entry: TrainEntry, setting: TrainSetting, pace: Pace, number: int) -> TrainReading:
    """Collective: builds a contestant, trains with it and drops it.

    Args:
        entry: of the contestant.
        setting: of model, data and ranks.
        pace: how much.
        number: of the round.
    """
    trainer, why_not = measured(lambda: entry.build(setting))
    if trainer is not None and not why_not:
        run = _Run(trainer, setting, pace)
        reading, why_not = measured(lambda: run.measure(entry.name, number))
        trainer.close()
        del run
    del trainer
    gc.collect()
    if why_not:
        return TrainReading(entry.name, setting.size, setting.numel, number, why_not=why_not)
    return reading  # type: ignore[return-value]  # there is one where nothing was raised


class _Run:
    def __init__(self, trainer: Trainer, setting: TrainSetting, pace: Pace) -> None:
        self._trainer, self._setting, self._pace = trainer, setting, pace
        self._losses: list[Tensor] = []

    def measure(self, name: str, number: int) -> TrainReading:
        self._train(self._pace.warm_up)
        self._trainer.finish()
        sent, cpu = sent_nbytes(), _cpu_seconds()
        seconds = [self._timed() for _ in range(self._pace.blocks)]
        steps = self._pace.blocks * self._pace.steps
        return TrainReading(
            name,
            self._setting.size,
            self._setting.numel,
            number,
            tuple(seconds),
            sum(exchange(_cpu_seconds() - cpu)) / steps,
            statistics.mean(exchange(sent_nbytes() - sent)) / steps,
            tuple(map(statistics.mean, zip(*exchange(torch.stack(self._losses).tolist()), strict=True))),
        )

    def _timed(self) -> float:
        """What a block leaves for the next step is waited for inside it: every step pays for all of its work."""
        start = now()
        self._train(self._pace.steps)
        self._trainer.finish()
        return (now() - start) / self._pace.steps

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._losses.append(self._trainer.train(batch(self._setting, len(self._losses))))


def _cpu_seconds() -> float:
    return sum(os.times()[:2])


def sent_nbytes() -> int:
    """What this process has handed to `write` since it started: all that a rank writes goes to gloo's sockets."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["wchar"])
