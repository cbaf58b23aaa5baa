"""`megatron-distopt diff`: in what two checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.tensor_file import bits_of
from megatron_distopt.cli.checkpoints import nbytes_of, open_at, params_text, settings_of
from megatron_distopt.cli.show import Answer, listed, more, plural, progress_of, rows, titled
from megatron_distopt.hosts.megatron.naming import canonical

#: More tensors of a kind than this, and more params in one line, are only counted; --json has all.
_LISTED, _NAMED = 20, 8
#: Elements that are compared at once: what that needs in addition to the tensors is small.
_AT_ONCE = 1 << 20
#: Settings by name.
_Values: TypeAlias = Mapping[str, object]


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
    note: str  # how dtypes and shapes differ; empty where they are equal
    # of the rows that both have; of no element where the shapes differ otherwise
    difference: Difference

    def rank(self) -> tuple[bool, float, str]:
        """For sorting: the largest difference comes first, and nan before all numbers."""
        largest = self.difference.largest
        return not math.isnan(largest), -largest, self.key

    def row(self) -> tuple[str, str, str, str]:
        """Its cells in a table."""
        found = self.difference
        return (
            name_of(self.key),
            f"{found.largest:.3g}",
            f"{found.relative:.2g}",
            f"{found.count:,} of {found.numel:,}",
        )

    def as_json(self) -> dict[str, Any]:
        found = self.difference
        return {"key": self.key, "note": self.note, **asdict(found), "relative": found.relative}


@dataclass(frozen=True)
class _Setting:
    """An option or a count that differs."""

    what: str
    first: object  # JSON values; None is what is not said
    second: object
    names: list[str] = field(default_factory=list)  # of params; empty for the whole checkpoint

    def row(self) -> tuple[str, str, str, str]:
        """Its cells in a table."""
        where = "the whole checkpoint"
        if self.names:
            where = plural(len(self.names), "param")
        return self.what, _shown(self.first), _shown(self.second), where


def _shown(value: object) -> str:
    return "not said" if value is None else str(value)


def answer(parsed: argparse.Namespace) -> Answer:
    """Compares two checkpoints."""
    first, second = open_at(parsed.first), open_at(parsed.second)
    ours, theirs = first.source.tensors, second.source.tensors
    # Megatrons name the same param differently.
    named = {_common_key(key): key for key in theirs}
    both: dict[str, str] = {}
    names: dict[str, str] = {}
    for key in ours:
        common = _common_key(key)
        if common in named:
            other = named[common]
            both[key] = other
            names[name_of(key)] = name_of(other)
    pairs = sorted(_pairs(first.source, second.source, both), key=_Pair.rank)
    settings = _settings_that_differ(first.manifest, second.manifest, names)
    alone = {
        "A": [key for key in ours if key not in both],
        "B": [key for key in theirs if key not in both.values()],
    }
    has_all_equal = not any(pair.note or pair.difference.count for pair in pairs)
    is_equal = has_all_equal and not settings and not any(alone.values())
    document = {
        "checkpoints": [str(first.path), str(second.path)],
        "is_equal": is_equal,
        "settings": [asdict(setting) for setting in settings],
        "only_in_first": alone["A"],
        "only_in_second": alone["B"],
        "tensors": [pair.as_json() for pair in pairs],
    }
    heads = [("A", first.text), ("B", second.text)]
    parts: list[RenderableType] = [titled("checkpoints", rows(heads))]
    if is_equal:
        num_params = plural(len(names), "param")
        num_tensors = plural(len(pairs), "tensor")
        text = f"equal to the bit: {num_params}, {num_tensors} and all settings"
        parts.append(Text(text))
    else:
        parts += _parts(pairs, settings, alone)
    return Answer(document, parts, status=int(not is_equal))


def _common_key(key: str) -> str:
    return key_of(kind_of(key), canonical(name_of(key)))


def _pairs(first: Source, second: Source, both: Mapping[str, str]) -> Iterator[_Pair]:
    """Reads what both have; one tensor of each is in memory at a time."""
    total = sum(
        nbytes_of(first.tensors[ours]) + nbytes_of(second.tensors[other])
        for ours, other in both.items()
    )
    with progress_of("comparing", total) as progress:
        for ours, other in both.items():
            yield _pair(first, second, ours, other)
            progress(nbytes_of(first.tensors[ours]))
            progress(nbytes_of(second.tensors[other]))


def _pair(first: Source, second: Source, ours: str, other: str) -> _Pair:
    """Compares one tensor of the first, of the key `ours`, with one of the second."""
    one, two = first.tensors[ours], second.tensors[other]
    notes = []
    if one.dtype != two.dtype:
        notes.append(f"{one.dtype} and {two.dtype}")
    first_shape, second_shape = list(one.shape), list(two.shape)
    shapes = f"{first_shape} and {second_shape}"
    difference = Difference()
    if one.shape == two.shape:
        difference = compare(first.read(ours), second.read(other))
    elif _differ_in_rows(one.shape, two.shape):
        # a vocabulary that was padded for another number of ranks
        length = min(one.shape[0], two.shape[0])
        rows_of_first = first.read(ours)[:length]
        rows_of_second = second.read(other)[:length]
        difference = compare(rows_of_first, rows_of_second)
        last = length - 1
        notes.append(f"{shapes}: rows 0 to {last} compared")
    else:
        notes.append(f"{shapes}: not compared")
    return _Pair(ours, "; ".join(notes), difference)


def _differ_in_rows(one: Sequence[int], two: Sequence[int]) -> bool:
    if len(one) != len(two):
        return False
    return one[1:] == two[1:]


def compare(first: Tensor, second: Tensor) -> Difference:
    """Counts the elements of two tensors of one shape that differ, and measures by how much."""
    has_one_dtype = first.dtype == second.dtype
    is_equal = has_one_dtype and torch.equal(bits_of(first), bits_of(second))
    if is_equal or not first.numel():
        return Difference(numel=first.numel())
    count = 0
    largest = magnitude = 0.0
    of_first = torch.split(first.reshape(-1), _AT_ONCE)
    of_second = torch.split(second.reshape(-1), _AT_ONCE)
    for ours, theirs in zip(of_first, of_second, strict=True):
        wide = ours.double()
        largest_value = wide.nan_to_num(0.0).abs().max().item()
        magnitude = max(magnitude, largest_value)
        differs = wide != theirs.double()
        if has_one_dtype:
            differs = bits_of(ours) != bits_of(theirs)
        if differs.any():
            count += int(differs.sum())
            apart = wide[differs] - theirs[differs].double()
            furthest = apart.abs().max().item()
            largest = float(np.maximum(largest, furthest))  # nan where one is
    return Difference(count, first.numel(), largest, magnitude)


def _settings_that_differ(
    first: Manifest, second: Manifest, names: Mapping[str, str]
) -> list[_Setting]:
    """Returns what differs of options, update counts and loss scales.

    They are compared param by param, because two checkpoints may put the same params into other
    groups. `names` goes from those of params in the first to those in the second.
    """
    ours, theirs = _settings_by_param(first), _settings_by_param(second)
    found: dict[str, _Setting] = {}
    for name, other in names.items():
        of_first = ours.get(name, {})
        of_second = theirs.get(other, {})
        for setting in _differing(of_first, of_second):
            known = found.setdefault(repr(setting), setting)
            known.names.append(name)
    of_whole = _differing(_settings_of_whole(first), _settings_of_whole(second))
    return [*found.values(), *of_whole]


def _settings_by_param(manifest: Manifest) -> dict[str, _Values]:
    found: dict[str, _Values] = {}
    for group in manifest.groups:
        settings = settings_of(group)
        found |= dict.fromkeys(group.names, settings)
    return found


def _settings_of_whole(manifest: Manifest) -> _Values:
    scale = {f"loss scale: {key}": value for key, value in manifest.loss_scale.items()}
    return {**scale, "skipped steps": manifest.num_skipped}


def _differing(first: _Values, second: _Values) -> list[_Setting]:
    found = []
    for name in dict.fromkeys([*first, *second]):
        ours = first.get(name)
        theirs = second.get(name)
        if ours != theirs:
            found.append(_Setting(name, ours, theirs))
    return found


# --- for people


def _parts(
    pairs: Sequence[_Pair], settings: Sequence[_Setting], alone: Mapping[str, Sequence[str]]
) -> Iterator[RenderableType]:
    if settings:
        cells = [("what", "A", "B", "where")]
        cells += [setting.row() for setting in settings]
        yield titled("settings that differ", rows(cells))
    noted: dict[str, list[str]] = {}
    for side, keys in alone.items():
        if keys:
            noted[f"only in {side}"] = [*keys]
    for pair in pairs:
        if pair.note:
            noted.setdefault(pair.note, []).append(pair.key)
    if noted:
        lines = []
        for note, keys in noted.items():
            lines.append((listed(params_text(keys), _NAMED), note))
        yield titled("tensors, shapes and dtypes that differ", rows(lines))
    by_kind: dict[str, list[_Pair]] = {}
    for pair in pairs:
        by_kind.setdefault(kind_of(pair.key), []).append(pair)
    main_first = sorted(by_kind, key=lambda kind: (kind != MAIN, kind))
    for kind in main_first:
        of_kind = by_kind[kind]
        differ = [pair for pair in of_kind if pair.difference.count]
        if not differ:
            yield Text(f"{kind}: equal to the bit")
            continue
        table = [("param", "max |A-B|", "/ max |A|", "elements")]
        table += [pair.row() for pair in differ[:_LISTED]]
        num_tensors = plural(len(of_kind), "tensor")
        title = f"{kind}: {len(differ):,} of {num_tensors} differ"
        rest = (f"  {line}" for line in more(len(differ), _LISTED))
        yield titled(title, rows(table), *rest)
    yield Text("different")
