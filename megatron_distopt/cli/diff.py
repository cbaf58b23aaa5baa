"""`megatron-distopt diff`: in what two checkpoints differ, and by how much; of two runs see diff_runs.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.cli.checkpoints import find, nbytes_of, settings_of
from megatron_distopt.cli.diff_runs import answer_about_runs, are_runs
from megatron_distopt.cli.show import Answer, counted, listed, more, number_text, progress_of, rows, titled
from megatron_distopt.formats import open_any
from megatron_distopt.hosts.naming import canonical

#: More tensors of a kind than this are only counted; --json has all.
_LISTED = 20
#: Params that one text is about, before they are only counted.
_NAMED = 8
#: Elements that are compared at once: what that needs in addition to the tensors is small.
_AT_ONCE = 1 << 20
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
    if are_runs(parsed.first, parsed.second):
        return answer_about_runs(parsed.first, parsed.second)
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
        words = f"{counted(len({name_of(pair.key) for pair in pairs}), 'param')}, {counted(len(pairs), 'tensor')}"
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
            where = counted(len(setting.names), "param") if setting.names else "the whole checkpoint"
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
            title = f"{kind}: {len(differ):,} of {counted(len(of_kind), 'tensor')} differ"
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
    yield Text(f"different: {', '.join(words + counted(count, noun) for words, count, noun in counts if count)}")


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
