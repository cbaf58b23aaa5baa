"""What step.py finds: readings of a contestant, ratios, shares of the bandwidth, and a table a
size."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peers.machine import MemoryRates, available_nbytes, seconds_of
from peers.report import (
    OURS,
    Rounds,
    Spread,
    doubts_of,
    failure,
    failures_of,
    median_seconds,
    percent,
    reports,
    spread,
)
from peers.steppers import StepEntry, Stepper, StepSetting, set_grads, weights

#: Of any contestant: 18 of state; and the params that it is compared with, before and after.
_NEEDED_NBYTES = 24
#: Norms of the gradients of the first steps, after which params are compared. Clipping shows if
#: only some are clipped.
FIRST_NORMS = (0.5, 4.0)
#: Of the change of the params. They are the same but for elements that were at the edge between two
#: bf16 numbers, which is about 1e-4. Without clipping it is 0.1; without weight decay, above 1e-3.
TOLERANCE = 1e-3
#: What a step has to read and write: grad 4, main param 8, two moments 16, model param 2.
FLOOR_NBYTES = 30
_OF_COPY, _OF_IN_PLACE = "share of the copy bandwidth", "share of the in-place bandwidth"
_HEADER = ("", "peer / ours", "ms", "GB/s", "of copy", "of in place", "apart", "")


@dataclass(frozen=True)
class StepReading:
    """One contestant in one round."""

    contestant: str  # its name
    numel: int  # elements of the model
    round: int  # repeats are rounds over all contestants
    seconds: tuple[float, ...] = ()  # of each timed step
    # of the first steps' change of the params from that of ours, relative, L2
    deviation: float | None = None
    why_not: str = ""  # the reason, where it was not run


def read(
    entry: StepEntry,
    setting: StepSetting,
    number: int,
    repeats: int,
    reference: list[Tensor],
    clock: Callable[[Callable[[], object]], float] = seconds_of,
) -> StepReading:
    """Builds a contestant, checks and times it, and drops it.

    Args:
        entry: of the contestant.
        setting: of the model.
        number: of the round.
        repeats: timed steps.
        reference: params after the first steps, of one size; ours fills it in the first round.
        clock: seconds that a call takes.
    """

    def measure() -> StepReading:
        needed, free = _NEEDED_NBYTES * setting.numel, available_nbytes() - (1 << 30)
        if setting.device == "cpu" and needed > free:
            text = (
                f"it needs about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are "
                "free"
            )
            return StepReading(entry.name, setting.numel, number, why_not=f"not run: {text}")
        stepper, seconds = entry.build(setting), []
        try:
            for norm in FIRST_NORMS:
                set_grads(stepper, norm)
                stepper.step()
            off = deviation(stepper, entry.name, reference) if number == 0 else None
            for _ in range(repeats):
                set_grads(stepper, FIRST_NORMS[-1])
                seconds.append(clock(stepper.step))
            return StepReading(entry.name, setting.numel, number, tuple(seconds), off)
        finally:
            stepper.close()

    measured: list[StepReading] = []
    why_not = failure(lambda: measured.append(measure()))
    gc.collect()
    return (
        measured[0] if measured else StepReading(entry.name, setting.numel, number, why_not=why_not)
    )


@torch.no_grad()
def deviation(stepper: Stepper, name: str, reference: list[Tensor]) -> float | None:
    """From ours, which comes first and whose params are kept; None where it failed."""
    params = [param.detach() for param in stepper.params]
    if not reference and name != "ours":
        return None
    if not reference:
        reference += [param.clone() for param in params]
    before = [param.detach() for param in weights(stepper.setting).parameters()]
    apart = sum(_square(param, other) for param, other in zip(params, reference, strict=True))
    change = sum(_square(other, start) for other, start in zip(reference, before, strict=True))
    return float((apart / change) ** 0.5)


def _square(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).square().sum())


def summary(
    numel: int, readings: Sequence[StepReading], rates: Sequence[MemoryRates]
) -> dict[str, Any]:
    """Of one size; ratios first.

    Args:
        numel: the size.
        readings: of any size.
        rates: of memory, by round.
    """
    rounds = Rounds([reading for reading in readings if reading.numel == numel])
    copies, products = [rate.copy for rate in rates], [rate.in_place for rate in rates]

    def share_of(moved: Sequence[float]) -> dict[str, Spread | None]:
        """What the floor of a step moves a second, as a part of what memory moves in the same
        round."""
        return rounds.spreads(
            lambda each: (
                FLOOR_NBYTES * numel / statistics.median(each.seconds) / moved[each.round]
                if each.seconds
                else None
            )
        )

    return {
        "numel": numel,
        "peer / ours": rounds.over(median_seconds),
        _OF_COPY: share_of(copies),
        _OF_IN_PLACE: share_of(products),
        "copy_bytes_per_second": spread(copies),
        "in_place_bytes_per_second": spread(products),
        "seconds": rounds.pooled(lambda each: each.seconds),
        "deviation": rounds.first(lambda each: each.deviation),
        **rounds.failures(),
    }


def lines(sizes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table a size; the last line has the ratios."""
    return reports(
        sizes,
        _heading,
        _HEADER,
        lambda size: [_row(name, size) for name in size["seconds"]],
        _last_words,
    )


def _heading(size: Mapping[str, Any]) -> str:
    copy, in_place = (
        size[name].times(1e-9) for name in ("copy_bytes_per_second", "in_place_bytes_per_second")
    )
    return (
        f"{size['numel'] / 1e6:.1f} M elements; a copy moves {copy} GB/s, a product in place "
        f"{in_place}"
    )


def _row(name: str, size: Mapping[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = size["seconds"][name]
    if seconds is None:
        return (name, *"-" * (len(_HEADER) - 2), size["why_not"].get(name, ""))
    off = size["deviation"][name]
    return (
        name,
        "" if name == OURS else str(size["peer / ours"][name] or "-"),
        str(seconds.times(1e3)),
        f"{FLOOR_NBYTES * size['numel'] / seconds.median / 1e9:.1f}",
        percent(size[_OF_COPY][name]),
        percent(size[_OF_IN_PLACE][name]),
        "-" if off is None else f"{off:.1e}",
        "; ".join(_notes(name, size)),
    )


def _notes(name: str, size: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of the figures has to know beside them."""
    apart = f"params differ by more than {TOLERANCE:.1%} of their change"
    yield from doubts_of(
        size["deviation"][name], TOLERANCE, apart, "it or ours failed in the first round"
    )
    yield from failures_of(name, size)


def _last_words(size: Mapping[str, Any]) -> str:
    ratios = {name: ratio.median for name, ratio in size["peer / ours"].items() if ratio}
    apart = ("fork of 2023", "the flat tensor")
    others = {name: ratio for name, ratio in ratios.items() if not name.startswith(apart)}
    parts = [f"{name}/ours {ratio:.2f}" for name, ratio in ratios.items() if name.startswith(apart)]
    if others:
        best = min(others, key=lambda name: others[name])
        parts.append(f"best peer ({best})/ours {others[best]:.2f}")
    return f"{size['numel'] / 1e6:.2g} M: " + ", ".join([*parts, _own_words(size)])


def _own_words(size: Mapping[str, Any]) -> str:
    of_copy, of_in_place = size[_OF_COPY].get(OURS), size[_OF_IN_PLACE].get(OURS)
    if of_copy is None:
        return "ours did not run"
    return (
        f"ours at {percent(of_copy)} of a copy's bandwidth, {percent(of_in_place)} of a product's "
        "in place"
    )
