"""`megatron-distopt diff`: in what two checkpoints differ, and by how much; of two runs see diff_runs.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.cli.checkpoints import CheckpointPath, find, nbytes_of, settings_of
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


def answer(parsed: argparse.Namespace) -> Answer:
    """Compares two checkpoints, or two runs that have logged digests.

    Raises:
        CheckpointError: a path holds no checkpoint, or a damaged one; or it is of another kind than the other path.
    """
    if are_runs(parsed.first, parsed.second):
        return answer_about_runs(parsed.first, parsed.second)
    places = find(parsed.first), find(parsed.second)
    compared = _compare_all(*(open_any(place.path) for place in places))
    document = _document(places, compared)
    return Answer(document, _parts(places, compared), status=0 if compared.is_equal else 1)


def _document(places: Iterable[CheckpointPath], compared: _Compared) -> dict[str, Any]:
    return {
        "checkpoints": [str(place.path) for place in places],
        "is_equal": compared.is_equal,
        "settings": [*map(asdict, compared.settings)],
        "only_in_first": list(compared.only_first),
        "only_in_second": list(compared.only_second),
        "tensors": [_pair_document(pair) for pair in sorted(compared.pairs, key=lambda pair: pair.order)],
    }


def _pair_document(pair: _Pair) -> dict[str, Any]:
    found = pair.difference
    numbers = {} if found is None else {**asdict(found), "relative": found.relative}
    is_equal = pair.is_alike and pair.has_equal_values
    return {"key": pair.key, "is_equal": is_equal, **numbers, "note": pair.note}


@dataclass(frozen=True)
class _Pair:
    """A tensor that both checkpoints have.

    Args:
        key: in the first.
        first, second: its shape and dtype in both.
        difference: of the rows that both have; None where the shapes differ otherwise.
    """

    key: str
    first: TensorInfo
    second: TensorInfo
    difference: Difference | None

    @property
    def is_alike(self) -> bool:
        """Whether shape and dtype are equal."""
        return self.first == self.second

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
        """Says how dtypes and shapes differ."""
        first, second = self.first, self.second
        dtypes = "" if first.dtype == second.dtype else f"{first.dtype} and {second.dtype}"
        shapes = "" if first.shape == second.shape else f"{list(first.shape)} and {list(second.shape)}"
        if shapes and self.difference is None:
            shapes += ": not compared"
        elif shapes:
            shapes += f": rows 0 to {min(first.shape[0], second.shape[0]) - 1} compared"
        return "; ".join(filter(None, (dtypes, shapes)))


@dataclass(frozen=True)
class _Compared:
    """The differences between two checkpoints.

    Args:
        pairs: all tensors that both have.
        only_first, only_second: keys that only one of them has.
        settings: settings that differ.
    """

    pairs: Sequence[_Pair]
    only_first: Sequence[str]
    only_second: Sequence[str]
    settings: Sequence[_Setting]

    @property
    def is_equal(self) -> bool:
        """Whether the two checkpoints are equal to the bit."""
        is_same = all(pair.is_alike and pair.has_equal_values for pair in self.pairs)
        return is_same and not (self.only_first or self.only_second or self.settings)


def _compare_all(first: Source, second: Source) -> _Compared:
    """Reads both checkpoints; one tensor of each is in memory at a time."""
    theirs = {_same(key): key for key in second.tensors}
    both = {key: theirs[_same(key)] for key in first.tensors if _same(key) in theirs}
    of_both = {*both.values()}
    total = sum(nbytes_of(first.tensors[a]) + nbytes_of(second.tensors[b]) for a, b in both.items())
    with progress_of("comparing", total) as progress:
        pairs = [_pair(first, second, a, b, progress) for a, b in both.items()]
    names = dict.fromkeys((name_of(a), name_of(b)) for a, b in both.items())
    return _Compared(
        pairs,
        [key for key in first.tensors if key not in both],
        [key for key in second.tensors if key not in of_both],
        [*_settings_that_differ(first.head, second.head, names)],
    )


def _same(key: str) -> str:
    """Returns the key that the tensor has with every host."""
    return key_of(kind_of(key), canonical(name_of(key)))


def _pair(first: Source, second: Source, ours: str, theirs: str, progress: Callable[[int], None]) -> _Pair:
    infos = first.tensors[ours], second.tensors[theirs]
    difference = None
    if infos[0].shape == infos[1].shape:
        difference = compare(first.read(ours), second.read(theirs))
    elif infos[0].shape[1:] == infos[1].shape[1:] and len(infos[0].shape) == len(infos[1].shape):
        rows = min(info.shape[0] for info in infos)  # a vocabulary that was padded for another number of ranks
        difference = compare(first.read(ours)[:rows], second.read(theirs)[:rows])
    progress(sum(map(nbytes_of, infos)))
    return _Pair(ours, *infos, difference)


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors of one shape.

    Args:
        count: elements whose bits differ, or whose values do where the dtypes differ.
        numel: elements compared.
        largest: absolute difference; nan where a nan is among them.
        magnitude: largest absolute value of the first; 0 where nothing differs.
    """

    count: int
    numel: int
    largest: float
    magnitude: float

    @property
    def relative(self) -> float:
        """The largest difference, divided by the largest value of the first tensor."""
        if not self.largest:
            return 0.0
        return self.largest / self.magnitude if self.magnitude else math.inf


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
        ours, theirs = (each[start : start + _AT_ONCE] for each in flat)
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


@dataclass(frozen=True)
class _Setting:
    """One setting that differs between two checkpoints.

    Args:
        what: an option, "step", or a number of the loss scale.
        first, second: its values; None where a checkpoint has none.
        names: names of the params that it applies to; empty for a setting of the whole checkpoint.
    """

    what: str
    first: object
    second: object
    names: tuple[str, ...] = ()


def _settings_that_differ(first: Manifest, second: Manifest, names: Iterable[tuple[str, str]]) -> Iterator[_Setting]:
    """Compares options param by param, because two checkpoints may put the same params into other groups.

    `names` are the names that a param has in both.
    """
    ours, theirs = _settings_by_name(first), _settings_by_name(second)
    found: dict[str, _Setting] = {}
    members: dict[str, list[str]] = {}
    for a, b in names:
        for each in _differing(ours.get(a, {}), theirs.get(b, {})):
            found.setdefault(repr(each), each)
            members.setdefault(repr(each), []).append(a)
    yield from (replace(each, names=tuple(members[key])) for key, each in found.items())
    yield from _differing(_of_the_whole(first), _of_the_whole(second))


def _settings_by_name(manifest: Manifest) -> dict[str, dict[str, object]]:
    return {name: settings for group in manifest.groups for settings in [settings_of(group)] for name in group.names}


def _differing(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[_Setting]:
    if first == second:
        return
    for what in dict.fromkeys([*first, *second]):
        if first.get(what) != second.get(what):
            yield _Setting(what, first.get(what), second.get(what))


def _of_the_whole(manifest: Manifest) -> dict[str, object]:
    scale = {f"loss scale: {key}": value for key, value in manifest.loss_scale.items()}
    return {**scale, "skipped steps": manifest.num_skipped}


def _parts(places: tuple[CheckpointPath, CheckpointPath], compared: _Compared) -> list[RenderableType]:
    heads = [(side, ", ".join(filter(None, (str(at.path), at.chosen)))) for side, at in zip("AB", places, strict=True)]
    found: dict[str, list[Sequence[str]]] = {
        "settings that differ": [*_setting_rows(compared.settings)],
        "params in one alone": [*_only("A", compared.only_first), *_only("B", compared.only_second)],
        "shapes and dtypes that differ": [*_notes(compared.pairs)],
    }
    parts: list[RenderableType] = [titled("checkpoints", rows(heads))]
    parts += [titled(title, rows(cells)) for title, cells in found.items() if cells]
    if not compared.is_equal:
        parts += _kind_parts(compared.pairs)
    return [*parts, Text(_verdict(compared))]


def _only(side: str, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kinds.setdefault(name_of(key), []).append(kind_of(key))
    if kinds:
        yield side, listed([f"{name} ({', '.join(kinds[name])})" for name in kinds], most=_NAMED)


def _notes(pairs: Sequence[_Pair]) -> Iterator[tuple[str, str]]:
    """Lists how shapes and dtypes differ: param by param, or how many where many differ alike."""
    all_kinds = dict.fromkeys(kind_of(pair.key) for pair in pairs)
    for note in dict.fromkeys(pair.note for pair in pairs if not pair.is_alike):
        keys = [pair.key for pair in pairs if pair.note == note]
        kinds = dict.fromkeys(map(kind_of, keys))
        names = list(dict.fromkeys(map(name_of, keys)))
        part = "" if kinds == all_kinds else f" ({', '.join(kinds)})"
        for name in names if len(names) <= _NAMED else [f"{len(names):,} params"]:
            yield f"{name}{part}", note


def _setting_rows(settings: Sequence[_Setting]) -> Iterator[tuple[str, str, str, str]]:
    if settings:
        yield "what", "A", "B", "where"
    for each in settings:
        first, second = ("not said" if value is None else number_text(value) for value in (each.first, each.second))
        yield each.what, first, second, counted(len(each.names), "param") if each.names else "the whole checkpoint"


def _kind_parts(pairs: Sequence[_Pair]) -> Iterator[RenderableType]:
    """Yields the largest differences of every kind that differs, and one line for the kinds that do not."""
    equal: list[str] = []
    kinds = {kind_of(pair.key) for pair in pairs}
    for kind in sorted(kinds, key=lambda kind: (kind != MAIN, kind)):
        of_kind = [pair for pair in pairs if kind_of(pair.key) == kind]
        differ = sorted((pair for pair in of_kind if not pair.has_equal_values), key=lambda pair: pair.order)
        if differ:
            title = f"{kind}: {len(differ):,} of {counted(len(of_kind), 'tensor')} differ"
            yield titled(
                title, rows(_difference_rows(differ[:_LISTED])), *(f"  {line}" for line in more(len(differ), _LISTED))
            )
        else:
            equal.append(kind)
    if equal:
        yield Text(f"{', '.join(equal)}: equal to the bit")


def _difference_rows(differ: Sequence[_Pair]) -> Iterator[tuple[str, str, str, str]]:
    yield "param", "max |A-B|", "/ max |A|", "elements"
    for pair in differ:
        found = pair.difference
        if found is not None:
            elements = f"{found.count:,} of {found.numel:,}"
            yield name_of(pair.key), f"{found.largest:.3g}", f"{found.relative:.2g}", elements


def _verdict(compared: _Compared) -> str:
    pairs, alone = compared.pairs, {name_of(key) for key in (*compared.only_first, *compared.only_second)}
    if compared.is_equal:
        params = len({name_of(pair.key) for pair in pairs})
        return f"equal to the bit: {counted(params, 'param')}, {counted(len(pairs), 'tensor')} and all settings"
    found = (
        ("values of ", sum(not pair.has_equal_values for pair in pairs), "tensor"),
        ("shapes or dtypes of ", sum(not pair.is_alike for pair in pairs), "tensor"),
        ("tensors in one alone of ", len(alone), "param"),
        ("", len(compared.settings), "setting"),
    )
    return f"different: {', '.join(said + counted(count, noun) for said, count, noun in found if count)}"
