"""`megatron-distopt diff`: in what two checkpoints differ, and by how much; or where two runs parted, and why.

Of runs that have logged digests the order in which things differ tells causes apart. A step computes gradients from
params and data, and then params and moments from gradients. So gradients that differ while the params before were equal
come from data, forward, backward or the sum over ranks, and params that differ after equal gradients come from the
update.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.digests import GRADS, LoggedRun, LoggedStep, differing, is_digest_file, read_run
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.cli.checkpoints import find, nbytes_of, settings_of
from megatron_distopt.cli.show import Answer, listed, more, number_text, plural, progress_of, rows, titled
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any
from megatron_distopt.hosts.naming import canonical

#: More tensors of a kind than this are only counted; --json has all.
_LISTED = 20
#: Params that one text is about, before they are only counted.
_NAMED = 8
#: Elements that are compared at once: what that needs in addition to the tensors is small.
_AT_ONCE = 1 << 20
#: The order in which a step computes what differs; moments come between.
_ORDER = {GRADS: 0, MAIN: 2}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors of one shape."""

    count: int  # elements whose bits differ, or whose values do where the dtypes differ
    numel: int  # elements compared
    largest: float  # absolute difference; nan where a nan is among them
    magnitude: float  # largest absolute value of the first; 0 where nothing differs

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
    first: TensorInfo
    second: TensorInfo
    difference: Difference | None  # of the rows that both have; None where the shapes differ otherwise

    @property
    def has_equal_values(self) -> bool:
        """Whether all compared values are equal to the bit."""
        return self.difference is None or not self.difference.count

    @property
    def order(self) -> tuple[float, str]:
        """Sorts the largest difference first; nan comes before all numbers."""
        largest = 0.0 if self.difference is None else self.difference.largest
        return -math.inf if math.isnan(largest) else -largest, self.key

    @property
    def note(self) -> str:
        """Says how dtypes and shapes differ; empty where they do not."""
        first, second = self.first, self.second
        dtypes = "" if first.dtype == second.dtype else f"{first.dtype} and {second.dtype}"
        shapes = "" if first.shape == second.shape else f"{list(first.shape)} and {list(second.shape)}"
        if shapes and self.difference is None:
            shapes += ": not compared"
        elif shapes:
            shapes += f": rows 0 to {min(first.shape[0], second.shape[0]) - 1} compared"
        return "; ".join(filter(None, (dtypes, shapes)))


@dataclass(frozen=True)
class _Setting:
    """An option, "step", or a number of the loss scale that differs; a value is None where a checkpoint has none."""

    what: str
    first: object
    second: object
    names: list[str] = field(default_factory=list)  # params that it applies to; empty for the whole checkpoint


def answer(parsed: argparse.Namespace) -> Answer:
    """Compares two checkpoints, or two runs that have logged digests.

    Raises:
        CheckpointError: a path holds no checkpoint, or a damaged one; or it is of another kind than the other path.
    """
    if _are_runs(parsed.first, parsed.second):
        return _answer_about_runs(parsed.first, parsed.second)
    places = find(parsed.first), find(parsed.second)
    first, second = (open_any(place.path) for place in places)
    theirs = {key_of(kind_of(key), canonical(name_of(key))): key for key in second.tensors}
    both = {key: theirs.get(key_of(kind_of(key), canonical(name_of(key))), "") for key in first.tensors}
    both = {ours: other for ours, other in both.items() if other}
    pairs = sorted(_pairs(first, second, both), key=lambda pair: pair.order)
    names = dict.fromkeys((name_of(ours), name_of(other)) for ours, other in both.items())
    settings = [*_settings_that_differ(first.head, second.head, names)]
    alone = {
        "A": [key for key in first.tensors if key not in both],
        "B": [key for key in second.tensors if key not in both.values()],
    }
    is_equal = all(pair.has_equal_values and not pair.note for pair in pairs) and not any((*alone.values(), settings))
    document = {
        "checkpoints": [str(place.path) for place in places],
        "is_equal": is_equal,
        "settings": [*map(asdict, settings)],
        "only_in_first": alone["A"],
        "only_in_second": alone["B"],
        "tensors": [_document(pair) for pair in pairs],
    }
    heads = [(side, ", ".join(filter(None, (str(at.path), at.chosen)))) for side, at in zip("AB", places, strict=True)]
    parts: list[RenderableType] = [titled("checkpoints", rows(heads))]
    if is_equal:
        words = f"{plural(len({name_of(pair.key) for pair in pairs}), 'param')}, {plural(len(pairs), 'tensor')}"
        parts.append(Text(f"equal to the bit: {words} and all settings"))
    else:
        parts += _parts(pairs, settings, alone)
    return Answer(document, parts, status=int(not is_equal))


def _pairs(first: Source, second: Source, both: Mapping[str, str]) -> Iterator[_Pair]:
    """Reads what both have; one tensor of each is in memory at a time."""
    total = sum(nbytes_of(first.tensors[ours]) + nbytes_of(second.tensors[other]) for ours, other in both.items())
    with progress_of("comparing", total) as progress:
        for ours, other in both.items():
            infos, difference = (first.tensors[ours], second.tensors[other]), None
            one, two = infos[0].shape, infos[1].shape
            if one == two:
                difference = compare(first.read(ours), second.read(other))
            elif one[1:] == two[1:] and len(one) == len(two):
                length = min(one[0], two[0])  # a vocabulary that was padded for another number of ranks
                difference = compare(first.read(ours)[:length], second.read(other)[:length])
            progress(sum(map(nbytes_of, infos)))
            yield _Pair(ours, *infos, difference)


def compare(first: Tensor, second: Tensor) -> Difference:
    """Counts the elements that differ, and measures by how much.

    Args:
        first, second: tensors of one shape, on the CPU.

    >>> compare(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    Difference(count=1, numel=2, largest=1.0, magnitude=4.0)
    """
    if first.dtype == second.dtype and torch.equal(_bits(first), _bits(second)):
        return Difference(0, first.numel(), 0.0, 0.0)
    count, largest, magnitude = 0, 0.0, 0.0
    flat = first.reshape(-1), second.reshape(-1)
    for start in range(0, first.numel(), _AT_ONCE):
        ours, theirs = (tensor[start : start + _AT_ONCE] for tensor in flat)
        wide = ours.double()
        magnitude = max(magnitude, wide.nan_to_num(0.0).abs().max().item())
        differs = _bits(ours) != _bits(theirs) if ours.dtype == theirs.dtype else wide != theirs.double()
        if differs.any():
            count += int(differs.sum())
            apart = (wide[differs] - theirs[differs].double()).abs().max().item()
            largest = apart if math.isnan(apart) else largest if math.isnan(largest) else max(largest, apart)
    return Difference(count, first.numel(), largest, magnitude)


def _bits(tensor: Tensor) -> Tensor:
    """Views a tensor as integers, which are equal only if the bits are: nan equals nan, and -0.0 differs from 0.0."""
    return tensor.view(_BITS[tensor.element_size()])


def _settings_that_differ(first: Manifest, second: Manifest, names: Iterable[tuple[str, str]]) -> Iterator[_Setting]:
    """Compares options param by param, because two checkpoints may put the same params into other groups.

    `names` are the names that a param has in both.
    """
    ours, theirs = (
        {name: settings_of(group) for group in manifest.groups for name in group.names} for manifest in (first, second)
    )
    found: dict[str, _Setting] = {}
    for name, other in names:
        for setting in _differing(ours.get(name, {}), theirs.get(other, {})):
            found.setdefault(repr(setting), setting).names.append(name)
    yield from found.values()
    whole = (
        {**{f"loss scale: {key}": value for key, value in head.loss_scale.items()}, "skipped steps": head.num_skipped}
        for head in (first, second)
    )
    yield from _differing(*whole)


def _differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[_Setting]:
    names = dict.fromkeys([*first, *second]) if first != second else ()
    return [_Setting(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _document(pair: _Pair) -> dict[str, Any]:
    found = pair.difference
    numbers = {} if found is None else {**asdict(found), "relative": found.relative}
    return {"key": pair.key, "is_equal": pair.has_equal_values and not pair.note, **numbers, "note": pair.note}


# --- for people


def _parts(
    pairs: Sequence[_Pair], settings: Sequence[_Setting], alone: Mapping[str, Sequence[str]]
) -> Iterator[RenderableType]:
    if settings:
        cells: list[Sequence[str]] = [("what", "A", "B", "where")]
        for setting in settings:
            values = ("not said" if value is None else number_text(value) for value in (setting.first, setting.second))
            where = plural(len(setting.names), "param") if setting.names else "the whole checkpoint"
            cells.append((setting.what, *values, where))
        yield titled("settings that differ", rows(cells))
    if any(alone.values()):
        yield titled("params in one alone", rows((side, _params_text(keys)) for side, keys in alone.items()))
    if any(pair.note for pair in pairs):
        yield titled("shapes and dtypes that differ", rows(_notes(pairs)))
    equal: list[str] = []
    for kind in sorted({kind_of(pair.key) for pair in pairs}, key=lambda kind: (kind != MAIN, kind)):
        of_kind = [pair for pair in pairs if kind_of(pair.key) == kind]
        differ = [pair for pair in of_kind if not pair.has_equal_values]
        if differ:
            title = f"{kind}: {len(differ):,} of {plural(len(of_kind), 'tensor')} differ"
            rest = (f"  {line}" for line in more(len(differ), _LISTED))
            yield titled(title, rows(_difference_rows(differ[:_LISTED])), *rest)
        else:
            equal.append(kind)
    if equal:
        yield Text(f"{', '.join(equal)}: equal to the bit")
    counts = (
        ("values of ", sum(not pair.has_equal_values for pair in pairs), "tensor"),
        ("shapes or dtypes of ", sum(bool(pair.note) for pair in pairs), "tensor"),
        ("tensors in one alone of ", len({name_of(key) for keys in alone.values() for key in keys}), "param"),
        ("", len(settings), "setting"),
    )
    yield Text(f"different: {', '.join(words + plural(count, noun) for words, count, noun in counts if count)}")


def _params_text(keys: Sequence[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kinds.setdefault(name_of(key), []).append(kind_of(key))
    return listed([f"{name} ({', '.join(of_name)})" for name, of_name in kinds.items()], most=_NAMED)


def _notes(pairs: Sequence[_Pair]) -> Iterator[tuple[str, str]]:
    """Lists how shapes and dtypes differ, and of which params."""
    all_kinds = {kind_of(pair.key) for pair in pairs}
    for note in dict.fromkeys(pair.note for pair in pairs if pair.note):
        keys = [pair.key for pair in pairs if pair.note == note]
        names, kinds = dict.fromkeys(map(name_of, keys)), dict.fromkeys(map(kind_of, keys))
        part = "" if kinds.keys() == all_kinds else f" ({', '.join(kinds)})"
        yield (f"{len(names):,} params" if len(names) > _NAMED else ", ".join(names)) + part, note


def _difference_rows(differ: Sequence[_Pair]) -> Iterator[tuple[str, str, str, str]]:
    yield "param", "max |A-B|", "/ max |A|", "elements"
    for pair in differ:
        if (found := pair.difference) is not None:
            elements = f"{found.count:,} of {found.numel:,}"
            yield name_of(pair.key), f"{found.largest:.3g}", f"{found.relative:.2g}", elements


# --- two runs


def _are_runs(first: Path, second: Path) -> bool:
    """Whether both paths are digest files, rather than checkpoints.

    Raises:
        CheckpointError: one is a digest file and the other one is not.
    """
    found = is_digest_file(first), is_digest_file(second)
    if any(found) and not all(found):
        digests, other = (first, second) if found[0] else (second, first)
        raise CheckpointError(
            f"{digests} holds digests of a run, and {other} does not. Name two checkpoints, or two files that "
            "--distopt-log-digests wrote."
        )
    return all(found)


def _answer_about_runs(first: Path, second: Path) -> Answer:
    """Compares two runs at the steps that both have logged.

    Raises:
        CheckpointError: a file is damaged, or the runs have nothing to compare.
    """
    runs = read_run(first), read_run(second)
    steps = sorted(runs[0].steps.keys() & runs[1].steps.keys())
    pairs = [(runs[0].steps[step], runs[1].steps[step]) for step in steps]
    ours, theirs = (dict.fromkeys(name for pair in pairs for _, name in pair[side].digests) for side in (0, 1))
    common = ours.keys() & theirs.keys()
    if not common:
        shown = " and ".join(f"{run.path} has {_steps_text(run)}" for run in runs)
        raise CheckpointError(
            f"There is no step and param that both runs have logged: {shown}. Compare two runs of one model, with the "
            "same --distopt-log-digests."
        )
    parted = _first_difference(pairs)
    document: dict[str, Any] = {
        "runs": [str(first), str(second)],
        "is_equal": parted is None,
        "common_steps": steps,
        "parted": parted,
        "only_in_first": [name for name in ours if name not in theirs],
        "only_in_second": [name for name in theirs if name not in ours],
    }
    parts = _run_parts(runs, document)
    if parted is None:
        parts.append(Text(f"equal to the bit: {plural(len(common), 'param')} at {plural(len(steps), 'step')}"))
    return Answer(document, parts, status=int(parted is not None))


def _first_difference(pairs: Sequence[tuple[LoggedStep, LoggedStep]]) -> dict[str, Any] | None:
    """What differs at the first step at which a digest or "updated" does, as JSON values; None where nothing does."""
    before: int | None = None
    for one, other in pairs:
        keys = sorted(differing(one, other), key=lambda key: _ORDER.get(key[0], 1))
        both = [name for name in one.facts if name in other.facts]
        # A norm also differs where only the parallel sizes do.
        facts = {name: [one.facts[name], other.facts[name]] for name in both if one.facts[name] != other.facts[name]}
        if keys or "updated" in facts:
            params = {kind: [name for each, name in keys if each == kind] for kind, _ in keys}
            meaning = _meaning(one.number, before, {*params, *facts})
            found = {"step": one.number, "last_equal_step": before, "params": params, "facts": facts}
            return {**found, "meaning": meaning}
        before = one.number
    return None


def _meaning(step: int, before: int | None, differ: set[str]) -> str:
    """What the order of the differences says about the cause."""
    if "updated" in differ:
        return "one run skipped this step and the other did not: their loss scales or gradients differ"
    if before is None:
        return "they differ at the first step that both logged: initial weights, the checkpoint, or what came before"
    if step - before > 1:
        return (
            f"they parted in steps {before + 1:,} to {step:,}; to see in which, and what came first, resume both from "
            f"a checkpoint of step {before:,} or before with --distopt-log-digests 1"
        )
    if GRADS in differ:
        return "params and state before this step were equal: data, forward, backward, or the sum over ranks differ"
    if {"lr", "weight_decay"} & differ:
        return "gradients are equal, and options of the optimizer differ"
    return "gradients are equal, and the update differs: its options, clipping or kernel"


def _steps_text(run: LoggedRun) -> str:
    return f"steps {min(run.steps):,} to {max(run.steps):,}, every {run.every:,}" if run.steps else "no step"


def _kind_text(kind: str) -> str:
    return {GRADS: "gradients", MAIN: "params"}.get(kind, kind)


def _run_parts(runs: Sequence[LoggedRun], document: Mapping[str, Any]) -> list[RenderableType]:
    notes = [(f"{side}: {run.path}", _steps_text(run)) for side, run in zip("AB", runs, strict=True)]
    notes += [
        (f"in {side} alone", listed(document[f"only_in_{key}"], _NAMED))
        for side, key in zip("AB", ("first", "second"), strict=True)
    ]
    parted = document["parted"]
    if parted is None:
        return [titled("runs", rows(notes))]
    found = [(_kind_text(kind), listed(names, _NAMED)) for kind, names in parted["params"].items()]
    found += [(name, f"{number_text(a)} in A, {number_text(b)} in B") for name, (a, b) in parted["facts"].items()]
    kinds = [f"{_kind_text(kind)} of {plural(len(names), 'param')}" for kind, names in parted["params"].items()]
    return [
        titled("runs", rows(notes)),
        titled(f"first at step {parted['step']:,}", rows(found)),
        Text(parted["meaning"]),
        Text(f"parted at step {parted['step']:,}: {', '.join(kinds) or 'updated'}"),
    ]
