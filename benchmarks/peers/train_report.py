"""What train.py found: ratios, a table a number of ranks, and the last line."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from peers.ratios import ByRound, Spread, by_round, failures_of, over, spread
from peers.script import table
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import TrainReading, losses_apart

#: Largest relative difference of any loss from ours. All compute in bf16, those with fp32 params cast at other places:
#: up to 2e-4. Without clipping it is 2e-3 after six steps, with params gathered at every other step 1e-2.
TOLERANCE = 1e-3
_OURS = "ours"
_BEYOND = "beyond forward and backward, peer / ours"
_HEADER = ("", "peer / ours", "beyond fwd+bwd", "ms a step", "cpu ms", "sent B/element", "loss apart", "")


def summary(readings: Sequence[TrainReading]) -> dict[str, Any]:
    """Of one number of ranks; ratios first."""
    rounds: dict[str, list[TrainReading]] = {}
    for reading in readings:
        rounds.setdefault(reading.contestant, []).append(reading)
    seconds = {name: _medians(found) for name, found in rounds.items()}
    alone = seconds.get(FORWARD_BACKWARD.name, {})
    beyond = {name: _beyond(found, alone) for name, found in seconds.items()}
    trained = [name for name in rounds if name != FORWARD_BACKWARD.name]
    ours = rounds.get(_OURS, [])
    return {
        "ranks": readings[0].ranks,
        "numel": readings[0].numel,
        "peer / ours": _over_ours(trained, seconds),
        _BEYOND: _over_ours(trained, beyond),
        "seconds": {name: spread([s for r in found for s in r.seconds]) for name, found in rounds.items()},
        "cpu_seconds": _spreads(rounds, lambda reading: reading.cpu_seconds),
        "sent_nbytes_an_element": _spreads(rounds, lambda reading: reading.sent_nbytes / reading.numel),
        "loss_deviation": {name: losses_apart(rounds[name], ours) for name in trained},
        "last_loss": {name: r.losses[-1] for name in trained for r in reversed(rounds[name]) if r.losses},
        "why_not": {name: r.why_not for name, found in rounds.items() for r in reversed(found) if r.why_not},
        "failed_rounds": {name: sum(bool(r.why_not) for r in found) for name, found in rounds.items()},
        "readings": readings,
    }


def _medians(readings: Sequence[TrainReading]) -> ByRound:
    return by_round((each.round, statistics.median(each.seconds)) for each in readings if each.seconds)


def _beyond(seconds: ByRound, alone: ByRound) -> ByRound:
    """What a step took longer than forward and backward alone in the same round."""
    return by_round((number, max(taken - alone[number], 0.0)) for number, taken in seconds.items() if number in alone)


def _over_ours(names: Sequence[str], seconds: Mapping[str, ByRound]) -> dict[str, Spread | None]:
    return {name: over(seconds[name], seconds.get(_OURS, {})) for name in names if name != _OURS}


def _spreads(
    rounds: Mapping[str, Sequence[TrainReading]], figure: Callable[[TrainReading], float]
) -> dict[str, Spread | None]:
    return {name: spread([figure(each) for each in found if each.seconds]) for name, found in rounds.items()}


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a number of ranks; the last line has the ratios."""
    for ranks in found:
        yield ""
        yield f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements"
        yield from table(_HEADER, [_row(name, ranks) for name in ranks["seconds"]])
    yield ""
    yield last_line(found)


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
        off = ranks["loss_deviation"][name]
        if off is None:
            yield "NOT COMPARED: it and ours have no round in common"
        elif not off <= TOLERANCE:
            yield f"NOT THE SAME WORK: losses differ by more than {TOLERANCE:.1%}"
    yield from failures_of(name, ranks)


def last_line(found: Sequence[Mapping[str, Any]]) -> str:
    """The ratios that matter."""
    return "; ".join(_last_words(ranks) for ranks in found) or "nothing was run"


def _last_words(ranks: Mapping[str, Any]) -> str:
    ratios = [f"{name}/ours {ratio.median:.2f}" for name, ratio in ranks["peer / ours"].items() if ratio]
    without = "nothing to compare with" if ranks["seconds"].get("ours") else "ours did not run"
    return f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.0f} M: " + (", ".join(ratios) or without)
