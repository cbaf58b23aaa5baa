"""What train.py found: ratios, a table a number of ranks, and the last line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peers.report import OURS, Rounds, Spread, failures_of, median_seconds, report
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import TrainReading, losses_apart

#: Largest relative difference of any loss from ours. All compute in bf16, those with fp32 params cast at other places:
#: up to 2e-4. Without clipping it is 2e-3 after six steps, with params gathered at every other step 1e-2.
TOLERANCE = 1e-3
_BEYOND = "beyond forward and backward, peer / ours"
_HEADER = ("", "peer / ours", "beyond fwd+bwd", "ms a step", "cpu ms", "sent B/element", "loss apart", "")


def summary(readings: Sequence[TrainReading]) -> dict[str, Any]:
    """Of one number of ranks; ratios first."""
    rounds = Rounds(readings)
    trained = Rounds([each for each in readings if each.contestant != FORWARD_BACKWARD.name])
    alone = rounds.values(FORWARD_BACKWARD.name, median_seconds)

    def beyond(reading: TrainReading) -> float | None:
        """What a step took longer than forward and backward alone in the same round."""
        taken = median_seconds(reading)
        return None if taken is None or reading.round not in alone else max(taken - alone[reading.round], 0.0)

    return {
        "ranks": readings[0].ranks,
        "numel": readings[0].numel,
        "peer / ours": trained.over(median_seconds),
        _BEYOND: trained.over(beyond),
        "seconds": rounds.pooled(lambda each: each.seconds),
        "cpu_seconds": rounds.spreads(lambda each: each.cpu_seconds if each.seconds else None),
        "sent_nbytes_an_element": rounds.spreads(lambda each: each.sent_nbytes / each.numel if each.seconds else None),
        "loss_deviation": {name: losses_apart(found, trained.of.get(OURS, [])) for name, found in trained.of.items()},
        "last_loss": {name: r.losses[-1] for name, found in trained.of.items() for r in reversed(found) if r.losses},
        **rounds.failures(),
        "readings": readings,
    }


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return report(
        found,
        lambda ranks: f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.1f} M elements",
        _HEADER,
        _row,
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
        off = ranks["loss_deviation"][name]
        if off is None:
            yield "NOT COMPARED: it and ours have no round in common"
        elif not off <= TOLERANCE:
            yield f"NOT THE SAME WORK: losses differ by more than {TOLERANCE:.1%}"
    yield from failures_of(name, ranks)


def _last_words(ranks: Mapping[str, Any]) -> str:
    ratios = [f"{name}/ours {ratio.median:.2f}" for name, ratio in ranks["peer / ours"].items() if ratio]
    without = "nothing to compare with" if ranks["seconds"].get("ours") else "ours did not run"
    return f"{ranks['ranks']} ranks, {ranks['numel'] / 1e6:.0f} M: " + (", ".join(ratios) or without)
