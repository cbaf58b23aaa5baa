"""`megatron-distopt diff`: in what two checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.digests import bits_of, is_digest_file
from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.cli.checkpoints import nbytes_of, open_at, params_text, settings_of
from megatron_distopt.cli.diff_runs import answer_about_runs
from megatron_distopt.cli.show import Answer, listed, more, plural, progress_of, rows, titled
from megatron_distopt.errors import CheckpointError
from megatron_distopt.hosts.megatron.naming import canonical

#: More tensors of a kind than this, and more params in one line, are only counted; --json has all.
_LISTED, _NAMED = 20, 8
#: Elements that are compared at once: what that needs in addition to the tensors is small.
_AT_ONCE = 1 << 20


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
        return answer_about_runs(*paths)
    if digests:
        (other,) = {*paths} - {*digests}
        raise CheckpointError(
            f"{digests[0]} holds digests of a run, and {other} does not. Name two checkpoints, or "
            "two files that --distopt-log-digests wrote."
        )
    first, second = map(open_at, paths)
    ours, theirs = first.source.tensors, second.source.tensors
    # Megatrons name the same param differently.
    named = {_common_key(key): key for key in theirs}
    common = {key: _common_key(key) for key in ours}
    both = {key: named[other] for key, other in common.items() if other in named}
    # The largest difference comes first, and nan before all numbers.
    pairs = sorted(
        _pairs(first.source, second.source, both),
        key=lambda pair: (
            not math.isnan(pair.difference.largest),
            -pair.difference.largest,
            pair.key,
        ),
    )
    settings = _settings_that_differ(
        first.manifest,
        second.manifest,
        {name_of(key): name_of(other) for key, other in both.items()},
    )
    alone = {
        "A": [key for key in ours if key not in both],
        "B": [key for key in theirs if key not in both.values()],
    }
    is_equal = not any(
        (*alone.values(), settings, *(pair.note or pair.difference.count for pair in pairs))
    )
    document = {
        "checkpoints": [str(first.path), str(second.path)],
        "is_equal": is_equal,
        "settings": settings,
        "only_in_first": alone["A"],
        "only_in_second": alone["B"],
        "tensors": [
            {
                "key": pair.key,
                "note": pair.note,
                **asdict(pair.difference),
                "relative": pair.difference.relative,
            }
            for pair in pairs
        ],
    }
    heads = [("A", first.text), ("B", second.text)]
    parts: list[RenderableType] = [titled("checkpoints", rows(heads))]
    if is_equal:
        names = {name_of(pair.key) for pair in pairs}
        counts = f"{plural(len(names), 'param')}, {plural(len(pairs), 'tensor')}"
        parts.append(Text(f"equal to the bit: {counts} and all settings"))
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
    has_one_dtype = first.dtype == second.dtype
    if not first.numel() or (has_one_dtype and torch.equal(bits_of(first), bits_of(second))):
        return Difference(numel=first.numel())
    count, largest, magnitude = 0, 0.0, 0.0
    stretches = (torch.split(tensor.reshape(-1), _AT_ONCE) for tensor in (first, second))
    for ours, theirs in zip(*stretches, strict=True):
        wide = ours.double()
        magnitude = max(magnitude, wide.nan_to_num(0.0).abs().max().item())
        differs = wide != theirs.double()
        if has_one_dtype:
            differs = bits_of(ours) != bits_of(theirs)
        if differs.any():
            count += int(differs.sum())
            apart = wide[differs] - theirs[differs].double()
            largest = float(np.maximum(largest, apart.abs().max().item()))  # nan where one is
    return Difference(count, first.numel(), largest, magnitude)


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
