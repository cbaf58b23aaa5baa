"""What train.py finds: readings of a contestant on all ranks at once, ratios, and a table a number
of ranks."""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.ranks import exchange, failure_of_any, now
from peers.report import OURS, Rounds, Spread, doubts_of, failures_of, median_seconds, reports
from peers.train_contestants import FORWARD_BACKWARD
from peers.trainers import TrainEntry, Trainer
from peers.transformer import TrainSetting, batch


@dataclass(frozen=True)
class Pace:
    """How much is run for a reading."""

    warm_up: int  # steps that are not timed
    blocks: int  # of timed steps
    steps: int  # of a block


#: So that imports, first allocations and first connections are over before anything is timed.
WARM_UP = Pace(1, 1, 1)
#: Largest relative difference of any loss from ours. All compute in bf16, those with fp32 params
#: cast at other places: up to 2e-4. Without clipping it is 2e-3 after six steps, with params
#: gathered at every other step 1e-2.
TOLERANCE = 1e-3
_BEYOND = "beyond forward and backward, peer / ours"
_HEADER = (
    "",
    "peer / ours",
    "beyond fwd+bwd",
    "ms a step",
    "cpu ms",
    "sent B/element",
    "loss apart",
    "",
)


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
    """The largest relative difference of any loss of the same round and step, infinite where one is
    not a number.

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
    """Collective: builds a contestant, trains with it and drops it; `number` is that of the
    round."""
    built: list[Trainer] = []
    measured: list[TrainReading] = []
    why_not = failure_of_any(lambda: built.append(entry.build(setting)))
    if not why_not:
        why_not = failure_of_any(
            lambda: measured.append(_measure(entry.name, built[0], setting, pace, number))
        )
        built.pop().close()
    gc.collect()
    if why_not:
        return TrainReading(entry.name, setting.size, setting.numel, number, why_not=why_not)
    return measured[0]


def _measure(
    name: str, trainer: Trainer, setting: TrainSetting, pace: Pace, number: int
) -> TrainReading:
    losses: list[Tensor] = []

    def train(steps: int) -> None:
        """What it leaves for the next step is waited for: every step pays for all of its work."""
        for _ in range(steps):
            losses.append(trainer.train(batch(setting, len(losses))))
        trainer.finish()

    def timed() -> float:
        start = now()
        train(pace.steps)
        return (now() - start) / pace.steps

    train(pace.warm_up)
    sent, cpu, steps = sent_nbytes(), sum(os.times()[:2]), pace.blocks * pace.steps
    seconds = tuple(timed() for _ in range(pace.blocks))
    return TrainReading(
        name,
        setting.size,
        setting.numel,
        number,
        seconds,
        sum(exchange(sum(os.times()[:2]) - cpu)) / steps,
        statistics.mean(exchange(sent_nbytes() - sent)) / steps,
        tuple(map(statistics.mean, zip(*exchange(torch.stack(losses).tolist()), strict=True))),
    )


def sent_nbytes() -> int:
    """What this process has handed to `write` and `writev` since it started, as the kernel adds it
    up.

    gloo writes to sockets of the loopback device, and that is all that a rank writes while it
    trains. Where there are several nodes, what the node has sent to others, with headers.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return int(
            Path(
                f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes"
            ).read_text()
        )
    line = next(
        line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar:")
    )
    return int(line.split()[1])


def summary(readings: Sequence[TrainReading]) -> dict[str, Any]:
    """Of one number of ranks; ratios first."""
    rounds = Rounds(readings)
    trained = Rounds([each for each in readings if each.contestant != FORWARD_BACKWARD.name])
    alone = rounds.values(FORWARD_BACKWARD.name, median_seconds)

    def beyond(reading: TrainReading) -> float | None:
        """What a step took longer than forward and backward alone in the same round."""
        taken = median_seconds(reading)
        return (
            None
            if taken is None or reading.round not in alone
            else max(taken - alone[reading.round], 0.0)
        )

    return {
        "ranks": readings[0].ranks,
        "numel": readings[0].numel,
        "peer / ours": trained.over(median_seconds),
        _BEYOND: trained.over(beyond),
        "seconds": rounds.pooled(lambda each: each.seconds),
        "cpu_seconds": rounds.spreads(cpu_seconds),
        "sent_nbytes_an_element": rounds.spreads(
            lambda each: each.sent_nbytes / each.numel if each.seconds else None
        ),
        "loss_deviation": {
            name: losses_apart(found, trained.of.get(OURS, []))
            for name, found in trained.of.items()
        },
        "last_loss": {
            name: r.losses[-1]
            for name, found in trained.of.items()
            for r in reversed(found)
            if r.losses
        },
        **rounds.failures(),
        "readings": readings,
    }


def cpu_seconds(reading: TrainReading) -> float | None:
    return reading.cpu_seconds if reading.seconds else None


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a number of ranks; the last line has the ratios."""
    return reports(
        found,
        lambda ranks: f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements",
        _HEADER,
        lambda ranks: [_row(name, ranks) for name in ranks["seconds"]],
        _last_words,
    )


def _row(name: str, ranks: Mapping[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = ranks["seconds"][name]
    if seconds is None:
        return (name, *"-" * (len(_HEADER) - 2), ranks["why_not"].get(name, ""))
    off, beyond = ranks["loss_deviation"].get(name), ranks[_BEYOND].get(name)
    return (
        name,
        str(ranks["peer / ours"].get(name) or ""),
        "" if beyond is None else f"{beyond.median:.2f}",
        str(seconds.times(1e3)),
        f"{ranks['cpu_seconds'][name].median * 1e3:.0f}",
        f"{ranks['sent_nbytes_an_element'][name].median:.2f}",
        "" if off is None else f"{off:.1e}",
        "; ".join(_notes(name, ranks)),
    )


def _notes(name: str, ranks: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of the figures has to know beside them."""
    if name in ranks["loss_deviation"]:
        apart = f"losses differ by more than {TOLERANCE:.1%}"
        yield from doubts_of(
            ranks["loss_deviation"][name], TOLERANCE, apart, "it and ours have no round in common"
        )
    yield from failures_of(name, ranks)


def _last_words(ranks: Mapping[str, Any]) -> str:
    ratios = [
        f"{name}/ours {ratio.median:.2f}" for name, ratio in ranks["peer / ours"].items() if ratio
    ]
    without = "nothing to compare with" if ranks["seconds"].get("ours") else "ours did not run"
    return f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.0f} M: " + (
        ", ".join(ratios) or without
    )
