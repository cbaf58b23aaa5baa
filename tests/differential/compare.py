"""Tells how a program went with us: equal to the reference, refused by an error of ours on all
ranks, or a failure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Sums over ranks and kernels for flat params round in another order than torch's: some 1e-7 of a
#: gradient below 1 in every step. The programs' eps of 1e-2 and lr of at most 0.05 keep that from
#: growing, 10 steps add it up. What a program does wrongly is of the order of lr times weight decay
#: times a weight, 1e-4, or more.
FP32_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Outcome:
    """How a program went."""

    kind: str  # "equal", "refused" or "failed"
    text: str = ""  # why; of a refusal its class and first words
    is_exact: bool = False  # equal to the bit


@dataclass(frozen=True)
class Tolerance:
    """How far a value may lie from the reference's."""

    # of the mantissa of the model's coarsest dtype. A main param that differs by rounding may be
    # rounded to the other neighbour in the model, and what the model computes then differs by as
    # much.
    bits: int

    def allows(self, ours: float, theirs: float) -> bool:
        if math.isnan(theirs) or math.isinf(theirs):
            return math.isnan(ours) or ours == theirs
        unit = 0.0 if self.bits >= 23 else 3 * 2.0**-self.bits
        # What a program fills and adds makes weights of a quarter, and rounding there outlives what
        # is taken off later.
        return abs(ours - theirs) <= FP32_TOLERANCE * (1 + abs(theirs)) + unit * max(
            abs(theirs), 2.0**-2
        )


BITS = {"float32": 23, "float16": 10, "bfloat16": 7, "mixed": 7}


def judge(
    ours: Sequence[dict[str, Any] | None],
    theirs: Sequence[dict[str, Any]],
    dtype: str,
    may_refuse: bool,
) -> Outcome:
    """Compares the ranks of one phase.

    Args:
        ours: by rank, what `run_our_rank` returned; None for a rank that did not end in time.
        theirs: by rank, of `run_reference`.
        dtype: of the model.
        may_refuse: whether the program contains something that an error of ours may answer.
    """
    faults = [rank["end"] for rank in theirs if rank["end"].startswith("Traceback")]
    if faults and all(rank is not None and _raised_as(rank, faults[0]) for rank in ours):
        return Outcome("equal", "torch itself raised")
    if faults:
        return Outcome("failed", f"the reference itself raised:\n{faults[0]}")
    ended = sorted({(rank or {"end": "stuck"})["end"] for rank in ours})
    must_refuse = any(rank["end"] != "finished" for rank in theirs)
    if (
        ended == ["refused"]
        or _only_waited_for(ours, theirs)
        or (may_refuse and _lost_at_the_end(ours, theirs))
    ):
        difference = _differences([_trained_on(rank) for rank in ours], theirs, dtype, prefix=True)
        if difference:
            return Outcome(
                "failed", f"refused, but after it was wrong already: {difference}\n{_ends(ours)}"
            )
        refused = [rank for rank in ours if rank and rank["end"] == "refused"]
        # rather the cause than who waited
        first = min(refused, key=lambda rank: rank["class"] == "RanksDisagreeError")
        text = f"{first['class']}: {first['text']}"
        if not may_refuse and not must_refuse:
            return Outcome("failed", f"refused though it promises to work: {text}")
        return Outcome("refused", text)
    if ended != ["finished"]:
        return Outcome("failed", f"ranks ended as {ended}\n{_ends(ours)}")
    if must_refuse:
        return Outcome("failed", f"finished, where the reference {theirs[0]['end']}")
    difference = _differences(ours, theirs, dtype)
    return (
        Outcome("failed", difference)
        if difference
        else Outcome("equal", is_exact=_is_exact(ours, theirs))
    )


def _raised_as(rank: dict[str, Any], traceback: str) -> bool:
    """Whether the program failed by the error that plain torch raises."""
    if rank["end"] != "raised":
        return False
    found, wanted = (
        re.sub("0x[0-9a-f]+", "", text.strip().splitlines()[-1])
        for text in (rank["text"], traceback)
    )
    return found == wanted


def _trained_on(rank: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of a rank that only heard of another's error: what it looked at behind its last step was
    trained on by nobody.

    It may be a gradient that its own program has written, which it reads while the others are told
    not to.
    """
    if rank is None or rank.get("class") != "RanksDisagreeError":
        return rank
    steps = [
        number for number, (label, _) in enumerate(rank["seen"]) if label == "result of the step"
    ]
    return {**rank, "seen": rank["seen"][: steps[-1] + 1 if steps else 0]}


def _only_waited_for(
    ours: Sequence[dict[str, Any] | None], theirs: Sequence[dict[str, Any]]
) -> bool:
    """Whether the ranks that were not refused had ended before others waited for them, as in the
    reference."""
    ends = [(rank or {"end": "stuck"})["end"] for rank in ours]
    if not set(ends) <= {"refused", "finished"}:
        return False
    pairs = list(zip(ends, (rank["end"] for rank in theirs), strict=True))
    return "refused" in ends and all(
        (mine == "finished") is (other == "finished") for mine, other in pairs
    )


def _lost_at_the_end(
    ours: Sequence[dict[str, Any] | None], theirs: Sequence[dict[str, Any]]
) -> bool:
    """Whether all errors say that a rank is gone, and those that are gone had carried out their
    whole program.

    A rank without data in the last backward has nothing left to do, so that nobody can tell it that
    the others wait.
    """
    pairs = list(zip(ours, theirs, strict=True))
    gone = [
        (mine, other) for mine, other in pairs if mine and mine["end"] == "finished" == other["end"]
    ]
    told = [mine for mine in ours if mine and mine.get("class") == "RanksDisagreeError"]
    is_whole = all(len(mine["seen"]) == len(other["seen"]) for mine, other in gone)
    return bool(gone) and bool(told) and len(gone) + len(told) == len(pairs) and is_whole


def _ends(ours: Sequence[dict[str, Any] | None]) -> str:
    lines = []
    for rank, given in enumerate(ours):
        result = given or {"end": "stuck", "text": "did not end in time"}
        lines.append(
            f"rank {rank} {result['end']}: {result.get('class', '')} {result.get('text', '')}"
        )
    return "\n".join(lines)


def _differences(
    ours: Sequence[Any], theirs: Sequence[Any], dtype: str, prefix: bool = False
) -> str:
    """The first value that differs, in words; empty where none does."""
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for place, ((label, value), (wanted_label, wanted)) in enumerate(
            zip(mine["seen"], other["seen"], strict=False)
        ):
            if label != wanted_label:
                return (
                    f"rank {rank} recorded {label!r} as number {place} where {wanted_label!r} was "
                    "expected"
                )
            found = difference(value, wanted, Tolerance(BITS[dtype]))
            if found:
                return f"rank {rank}, {label}: {found}"
        if not prefix and len(mine["seen"]) != len(other["seen"]):
            return (
                f"rank {rank} recorded {len(mine['seen'])} values, the reference "
                f"{len(other['seen'])}"
            )
    return ""


def difference(ours: Any, theirs: Any, tolerance: Tolerance) -> str:
    """How a recorded value differs; empty where it does not."""
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or ours.keys() != theirs.keys():
            return f"got {ours!r}, expected the keys {sorted(theirs)}"
        found = ((key, difference(ours[key], theirs[key], tolerance)) for key in theirs)
        return next((f"{key}: {text}" for key, text in found if text), "")
    if isinstance(theirs, list):
        if not isinstance(ours, list) or len(ours) != len(theirs):
            return f"got {ours!r}, expected {theirs!r}"
        found_in = (difference(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
        return next((f"[{place}]: {text}" for place, text in enumerate(found_in) if text), "")
    if isinstance(theirs, torch.Tensor):
        return _tensor_difference(ours, theirs, tolerance)
    if isinstance(theirs, float) and isinstance(ours, float):
        return "" if tolerance.allows(ours, theirs) else f"got {ours}, expected {theirs}"
    return "" if ours == theirs else f"got {ours!r}, expected {theirs!r}"


def _tensor_difference(ours: Any, theirs: torch.Tensor, tolerance: Tolerance) -> str:
    if not isinstance(ours, torch.Tensor) or (ours.shape, ours.dtype) != (
        theirs.shape,
        theirs.dtype,
    ):
        return f"got {ours!r}, expected {theirs!r}"
    pairs = list(
        zip(ours.double().flatten().tolist(), theirs.double().flatten().tolist(), strict=True)
    )
    wrong = [pair for pair in pairs if not tolerance.allows(*pair)]
    if not wrong:
        return ""
    worst = max(
        wrong, key=lambda pair: abs(pair[0] - pair[1]) if math.isfinite(pair[0]) else math.inf
    )
    return (
        f"{len(wrong)} of {len(pairs)} elements differ, most {worst[0]:.8g} where {worst[1]:.8g} "
        "is expected"
    )


def _is_exact(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return all(
        len(mine["seen"]) == len(other["seen"])
        and all(
            _same(value, wanted)
            for (_, value), (_, wanted) in zip(mine["seen"], other["seen"], strict=True)
        )
        for mine, other in zip(ours, theirs, strict=True)
    )


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return all(_same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return all(_same(*pair) for pair in zip(ours, theirs, strict=True))
    return torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else bool(ours == theirs)
