"""`megatron-distopt diff`: in what two checkpoints differ, and by how much; or where two runs
parted, and why.

Of runs that have logged digests the order in which things differ tells causes apart. A step
computes gradients from params and data, and then params and moments from gradients. So gradients
that differ while the params before were equal come from data, forward, backward or the sum over
ranks, and params that differ after equal gradients come from the update.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.digests import (
    GRADS,
    LoggedRun,
    LoggedStep,
    differing,
    is_digest_file,
    read_run,
)
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.cli.checkpoints import find, nbytes_of, params_text, settings_of
from megatron_distopt.cli.show import Answer, listed, more, plural, progress_of, rows, titled
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any
from megatron_distopt.hosts.megatron.naming import canonical

#: More tensors of a kind than this, and more params in one line, are only counted; --json has all.
_LISTED, _NAMED = 20, 8
#: Elements that are compared at once: what that needs in addition to the tensors is small.
_AT_ONCE = 1 << 20
#: The order in which a step computes what differs; moments come between.
_ORDER = {GRADS: 0, MAIN: 2}
_KIND_TEXTS = {GRADS: "gradients", MAIN: "params"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors of one shape."""

    count: int = 0  # elements whose bits differ, or whose values do where the dtypes differ
    numel: int = 0  # elements compared
    largest: float = 0.0  # absolute difference; nan where a nan is among them
    magnitude: float = 0.0  # largest absolute value of the first; 0 where nothing differs

    @property
    def relative(self) -> float:
        """The largest difference, divided by the largest value of the first tensor."""
        if not self.largest:
            return 0.0
        return self.largest / self.magnitude if self.magnitude else math.inf


@dataclass(frozen=True)
class _Pair:
    """A tensor that both checkpoints have."""

    key: str  # in the first
    note: str  # how dtypes and shapes differ; empty where they do not
    # of the rows that both have; of no element where the shapes differ otherwise
    difference: Difference


def answer(parsed: argparse.Namespace) -> Answer:
    """Compares two checkpoints, or two runs that have logged digests."""
    paths = parsed.first, parsed.second
    digests = [path for path in paths if is_digest_file(path)]
    if len(digests) == 2:
        return _answer_about_runs(*paths)
    if digests:
        (other,) = {*paths} - {*digests}
        raise CheckpointError(
            f"{digests[0]} holds digests of a run, and {other} does not. Name two checkpoints, or "
            "two files that --distopt-log-digests wrote."
        )
    places = [find(path) for path in paths]
    first, second = (open_any(place.path) for place in places)
    # Megatrons name the same param differently.
    theirs = {key_of(kind_of(key), canonical(name_of(key))): key for key in second.tensors}
    found = {
        key: theirs.get(key_of(kind_of(key), canonical(name_of(key)))) for key in first.tensors
    }
    both = {ours: other for ours, other in found.items() if other is not None}
    # The largest difference comes first, and nan before all numbers.
    pairs = sorted(
        _pairs(first, second, both),
        key=lambda pair: (
            not math.isnan(pair.difference.largest),
            -pair.difference.largest,
            pair.key,
        ),
    )
    settings = _settings_that_differ(
        first.head, second.head, {name_of(ours): name_of(both[ours]) for ours in both}
    )
    alone = {
        "A": [key for key in first.tensors if key not in both],
        "B": [key for key in second.tensors if key not in both.values()],
    }
    is_equal = not any(
        (*alone.values(), settings, *(pair.note or pair.difference.count for pair in pairs))
    )
    document = {
        "checkpoints": [str(place.path) for place in places],
        "is_equal": is_equal,
        "settings": settings,
        "only_in_first": alone["A"],
        "only_in_second": alone["B"],
        "tensors": [_document(pair) for pair in pairs],
    }
    heads = [
        (side, ", ".join(filter(None, (str(at.path), at.chosen))))
        for side, at in zip("AB", places, strict=True)
    ]
    parts: list[RenderableType] = [titled("checkpoints", rows(heads))]
    if is_equal:
        words = (
            f"{plural(len({name_of(pair.key) for pair in pairs}), 'param')}, "
            f"{plural(len(pairs), 'tensor')}"
        )
        parts.append(Text(f"equal to the bit: {words} and all settings"))
    else:
        parts += _parts(pairs, settings, alone)
    return Answer(document, parts, status=int(not is_equal))


def _pairs(first: Source, second: Source, both: Mapping[str, str]) -> Iterator[_Pair]:
    """Reads what both have; one tensor of each is in memory at a time."""
    total = sum(
        nbytes_of(first.tensors[ours]) + nbytes_of(second.tensors[other])
        for ours, other in both.items()
    )
    with progress_of("comparing", total) as progress:
        for ours, other in both.items():
            infos, difference = (first.tensors[ours], second.tensors[other]), Difference()
            dtypes, (one, two) = [info.dtype for info in infos], [info.shape for info in infos]
            notes = [] if dtypes[0] == dtypes[1] else [" and ".join(dtypes)]
            if one == two:
                difference = compare(first.read(ours), second.read(other))
            elif one[1:] == two[1:] and len(one) == len(two):
                # a vocabulary that was padded for another number of ranks
                length = min(one[0], two[0])
                difference = compare(first.read(ours)[:length], second.read(other)[:length])
                notes.append(f"{list(one)} and {list(two)}: rows 0 to {length - 1} compared")
            else:
                notes.append(f"{list(one)} and {list(two)}: not compared")
            progress(sum(map(nbytes_of, infos)))
            yield _Pair(ours, "; ".join(notes), difference)


def compare(first: Tensor, second: Tensor) -> Difference:
    """Counts the elements of two tensors of one shape that differ, and measures by how much."""
    if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
        return Difference(0, first.numel(), 0.0, 0.0)
    count, largest, magnitude = 0, 0.0, 0.0
    flat = first.reshape(-1), second.reshape(-1)
    for start in range(0, first.numel(), _AT_ONCE):
        ours, theirs = (tensor[start : start + _AT_ONCE] for tensor in flat)
        wide = ours.double()
        magnitude = max(magnitude, wide.nan_to_num(0.0).abs().max().item())
        differs = (
            _bits(ours) != _bits(theirs) if ours.dtype == theirs.dtype else wide != theirs.double()
        )
        if differs.any():
            count += int(differs.sum())
            apart = (wide[differs] - theirs[differs].double()).abs().max().item()
            largest = (
                apart
                if math.isnan(apart)
                else largest
                if math.isnan(largest)
                else max(largest, apart)
            )
    return Difference(count, first.numel(), largest, magnitude)


def _bits(tensor: Tensor) -> Tensor:
    """Views a tensor as integers, which are equal only if the bits are: nan equals nan, and -0.0
    differs from 0.0."""
    return tensor.view(_BITS[tensor.element_size()])


def _settings_that_differ(
    first: Manifest, second: Manifest, names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns what differs of options, update counts and loss scales, as JSON values; None is what
    is not said.

    They are compared param by param, because two checkpoints may put the same params into other
    groups. `names` goes from those of params in the first to those in the second.
    """
    ours, theirs = (
        {name: settings_of(group) for group in manifest.groups for name in group.names}
        for manifest in (first, second)
    )
    found: dict[str, dict[str, Any]] = {}
    for name, other in names.items():
        for setting in _differing(ours.get(name, {}), theirs.get(other, {})):
            found.setdefault(repr(setting), setting)["names"].append(name)
    whole = (
        {
            **{f"loss scale: {key}": value for key, value in head.loss_scale.items()},
            "skipped steps": head.num_skipped,
        }
        for head in (first, second)
    )
    return [*found.values(), *_differing(*whole)]


def _differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[dict[str, Any]]:
    return [
        {"what": name, "first": first.get(name), "second": second.get(name), "names": []}
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _document(pair: _Pair) -> dict[str, Any]:
    found = pair.difference
    is_equal = not found.count and not pair.note
    return {
        "key": pair.key,
        "is_equal": is_equal,
        **asdict(found),
        "relative": found.relative,
        "note": pair.note,
    }


# --- for people


def _parts(
    pairs: Sequence[_Pair],
    settings: Sequence[Mapping[str, Any]],
    alone: Mapping[str, Sequence[str]],
) -> Iterator[RenderableType]:
    if settings:
        cells: list[Sequence[str]] = [("what", "A", "B", "where")]
        for each in settings:
            values = (
                "not said" if value is None else str(value)
                for value in (each["first"], each["second"])
            )
            where = plural(len(each["names"]), "param") if each["names"] else "the whole checkpoint"
            cells.append((each["what"], *values, where))
        yield titled("settings that differ", rows(cells))
    noted = {f"in {side} alone": [*keys] for side, keys in alone.items() if keys}
    for pair in pairs:
        if pair.note:
            noted.setdefault(pair.note, []).append(pair.key)
    if noted:
        lines = ((listed(params_text(keys), _NAMED), note) for note, keys in noted.items())
        yield titled("tensors, shapes and dtypes that differ", rows(lines))
    for kind in sorted(
        {kind_of(pair.key) for pair in pairs}, key=lambda kind: (kind != MAIN, kind)
    ):
        of_kind = [pair for pair in pairs if kind_of(pair.key) == kind]
        differ = [(name_of(pair.key), pair.difference) for pair in of_kind if pair.difference.count]
        if not differ:
            yield Text(f"{kind}: equal to the bit")
            continue
        table = [
            (
                name,
                f"{found.largest:.3g}",
                f"{found.relative:.2g}",
                f"{found.count:,} of {found.numel:,}",
            )
            for name, found in differ[:_LISTED]
        ]
        title = f"{kind}: {len(differ):,} of {plural(len(of_kind), 'tensor')} differ"
        rest = (f"  {line}" for line in more(len(differ), _LISTED))
        yield titled(title, rows([("param", "max |A-B|", "/ max |A|", "elements"), *table]), *rest)
    yield Text("different")


# --- two runs


def _answer_about_runs(*paths: Path) -> Answer:
    """Compares two runs at the steps that both have logged."""
    first, second = map(read_run, paths)
    pairs = [
        (first.steps[step], second.steps[step])
        for step in sorted(first.steps.keys() & second.steps.keys())
    ]
    ours, theirs = (
        dict.fromkeys(name for pair in pairs for _, name in pair[side].digests) for side in (0, 1)
    )
    common = ours.keys() & theirs.keys()
    if not common:
        shown = " and ".join(f"{run.path} has {_steps_text(run)}" for run in (first, second))
        raise CheckpointError(
            f"There is no step and param that both runs have logged: {shown}. Compare two runs of "
            "one model, with the same --distopt-log-digests."
        )
    parted = _first_difference(pairs)
    alone = (
        [name for name in ours if name not in theirs],
        [name for name in theirs if name not in ours],
    )
    document: dict[str, Any] = {
        "runs": [str(path) for path in paths],
        "is_equal": parted is None,
        "common_steps": [step.number for step, _ in pairs],
        "parted": parted,
        "only_in_first": alone[0],
        "only_in_second": alone[1],
    }
    heads = [
        (f"{side}: {run.path}", _steps_text(run))
        for side, run in zip("AB", (first, second), strict=True)
    ]
    heads += [
        (f"in {side} alone", listed(names, _NAMED)) for side, names in zip("AB", alone, strict=True)
    ]
    parts: list[RenderableType] = [titled("runs", rows(heads))]
    if parted is None:
        parts.append(
            Text(
                f"equal to the bit: {plural(len(common), 'param')} at {plural(len(pairs), 'step')}"
            )
        )
    else:
        params = {_KIND_TEXTS.get(kind, kind): names for kind, names in parted["params"].items()}
        lines = [(kind, listed(names, _NAMED)) for kind, names in params.items()]
        lines += [(name, f"{a} in A, {b} in B") for name, (a, b) in parted["facts"].items()]
        kinds = [f"{kind} of {plural(len(names), 'param')}" for kind, names in params.items()]
        parts += [
            titled(f"first at step {parted['step']:,}", rows(lines)),
            Text(parted["meaning"]),
            Text(f"parted at step {parted['step']:,}: {', '.join(kinds) or 'updated'}"),
        ]
    return Answer(document, parts, status=int(parted is not None))


def _first_difference(pairs: Sequence[tuple[LoggedStep, LoggedStep]]) -> dict[str, Any] | None:
    """What differs at the first step at which a digest or "updated" does, as JSON values; None
    where nothing does."""
    before: int | None = None
    for one, other in pairs:
        keys = sorted(differing(one, other), key=lambda key: _ORDER.get(key[0], 1))
        both = [name for name in one.facts if name in other.facts]
        # A norm also differs where only the parallel sizes do.
        facts = {
            name: [one.facts[name], other.facts[name]]
            for name in both
            if one.facts[name] != other.facts[name]
        }
        if keys or "updated" in facts:
            params = {kind: [name for each, name in keys if each == kind] for kind, _ in keys}
            meaning = _meaning(one.number, before, {*params, *facts})
            found = {
                "step": one.number,
                "last_equal_step": before,
                "params": params,
                "facts": facts,
            }
            return {**found, "meaning": meaning}
        before = one.number
    return None


def _meaning(step: int, before: int | None, differ: set[str]) -> str:
    """What the order of the differences says about the cause."""
    if "updated" in differ:
        return (
            "one run skipped this step and the other did not: their loss scales or gradients differ"
        )
    if before is None:
        return (
            "they differ at the first step that both logged: initial weights, the checkpoint, or "
            "what came before"
        )
    if step - before > 1:
        return (
            f"they parted in steps {before + 1:,} to {step:,}; to see in which, and what came "
            f"first, resume both from a checkpoint of step {before:,} or before with "
            "--distopt-log-digests 1"
        )
    if GRADS in differ:
        return (
            "params and state before this step were equal: data, forward, backward, or the sum "
            "over ranks differ"
        )
    if {"lr", "weight_decay"} & differ:
        return "gradients are equal, and options of the optimizer differ"
    return "gradients are equal, and the update differs: its options, clipping or kernel"


def _steps_text(run: LoggedRun) -> str:
    return (
        f"steps {min(run.steps):,} to {max(run.steps):,}, every {run.every:,}"
        if run.steps
        else "no step"
    )
