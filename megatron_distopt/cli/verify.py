"""`megatron-distopt verify`: reads every byte of a checkpoint once, and says what is wrong in which file and param."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.cli.checkpoints import CheckpointPath, find, nbytes_of
from megatron_distopt.cli.checks import (
    METADATA_AREA,
    Problem,
    StoredChunk,
    box_text,
    check_chunks,
    check_file,
    check_groups,
    check_kinds,
    check_metadata,
    stored_in,
)
from megatron_distopt.cli.show import Answer, Status, counted, more, progress_of, rows, size_text, titled
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any
from megatron_distopt.layout import Box

#: More problems than this, and more params lost by one, are only counted.
_LISTED, _LOST_LISTED = 20, 8


@dataclass
class _Values:
    """The values that are not finite: the first place in every tensor, and their number."""

    first: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    numel: int = 0

    def look(self, key: str, tensor: Tensor, box: Box, where: str = "") -> None:
        """Looks at the values of one box."""
        self.numel += tensor.numel()
        bad = non_finite(tensor, box)
        if bad is not None:
            self.first.setdefault(key, f"{bad.value} at {list(bad.index)}{where}")
            self.counts[key] += bad.count

    def problems(self) -> Iterator[Problem]:
        """Yields one problem for each tensor with such values."""
        for key, text in self.first.items():
            more = f"; {self.counts[key]:,} of its values are not finite" if self.counts[key] > 1 else ""
            yield Problem("values", key, f"holds {text}{more}", (key,))


@dataclass(frozen=True)
class _Verified:
    """The outcome of the checks.

    Args:
        checked: what was looked at, by area; it is well where no problem of that area says otherwise.
        problems: everything that is wrong.
    """

    checked: Mapping[str, str]
    problems: Sequence[Problem]


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks a whole checkpoint.

    Raises:
        CheckpointError: the path holds none.
    """
    place = find(parsed.checkpoint)
    verified = _verify_own(place.path) if place.is_ours else _verify_other(open_any(place.path))
    document = {
        "checkpoint": str(place.path),
        "chosen": place.chosen,
        "is_whole": not verified.problems,
        "checked": dict(verified.checked),
        "problems": [*map(asdict, verified.problems)],
    }
    return Answer(document, _parts(place, verified), status=1 if verified.problems else 0)


def _verify_own(folder: Path) -> _Verified:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return _Verified({}, [Problem("manifest", "manifest.json", f"cannot be used: {error}")])
    values, problems = _Values(), list[Problem]()
    with progress_of("verifying", manifest.nbytes) as progress:
        for file, stored in zip(manifest.files, stored_in(manifest), strict=True):
            problems += check_file(folder / file.name, file, stored, _looker(values, file.name), progress)
    damaged = {key for problem in problems for key in problem.keys}
    problems += [*check_chunks(manifest), *check_metadata(folder, manifest)]
    infos = {key: TensorInfo(record.shape, record.dtype) for key, record in manifest.tensors.items()}
    files = f"{counted(len(manifest.files), 'file')}, {size_text(manifest.nbytes)}: sizes and checksums are right"
    found = _on_content(infos, manifest.groups, values)
    kept = [problem for problem in found.problems if not (problem.area == "values" and problem.subject in damaged)]
    checked = {"files": files, METADATA_AREA: "torch's own reader finds the same", **found.checked}
    return _Verified(checked, [*problems, *kept])


def _looker(values: _Values, file: str) -> Callable[[StoredChunk, Tensor], None]:
    def look(stored: StoredChunk, tensor: Tensor) -> None:
        values.look(stored.key, tensor, stored.chunk.box, f", in chunk {box_text(stored.chunk.box)} in {file}")

    return look


def _verify_other(source: Source) -> _Verified:
    values, problems = _Values(), list[Problem]()
    with progress_of("verifying", sum(map(nbytes_of, source.tensors.values()))) as progress:
        for key, info in source.tensors.items():
            try:
                tensor = source.read(key)
            except CheckpointError as error:
                problems.append(Problem("tensors", key, f"cannot be read: {error}", (key,)))
                continue
            values.look(key, tensor, Box.whole(info.shape))
            progress(nbytes_of(info))
    found = _on_content(source.tensors, source.head.groups, values)
    return _Verified(found.checked, [*problems, *found.problems])


def _on_content(tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord], values: _Values) -> _Verified:
    params = {name_of(key) for key in tensors}
    numel = sum(math.prod(info.shape) for info in tensors.values())
    read = "" if numel == values.numel else f" of {numel:,} could be read"
    checked = {
        "tensors": f"{counted(len(tensors), 'tensor')} of {counted(len(params), 'param')}: each element has one place",
        "values": f"{counted(values.numel, 'value')}{read}: all finite",
        "groups": f"{counted(len(groups), 'group')}: each param is in one, with the same state as the others in it",
    }
    return _Verified(checked, [*check_kinds(tensors, groups), *values.problems(), *check_groups(tensors, groups)])


def _parts(place: CheckpointPath, verified: _Verified) -> list[RenderableType]:
    head = titled("checkpoint", rows([("where", str(place.path)), ("which", place.chosen)]))
    return [head, rows(_rows(verified)), Text(_conclusion(verified.problems, place))]


def _rows(verified: _Verified) -> Iterator[tuple[str, str, str]]:
    for area in ("manifest", *verified.checked):
        problems = [problem for problem in verified.problems if problem.area == area]
        if not problems and area in verified.checked:
            yield Status.OK.value, area, verified.checked[area]
        for problem in problems[:_LISTED]:
            lost = [*problem.lost[:_LOST_LISTED], *more(len(problem.lost), _LOST_LISTED)]
            yield Status.PROBLEM.value, area, "\n".join([f"{problem.subject} {problem.text}", *lost])
        for line in more(len(problems), _LISTED):
            yield Status.PROBLEM.value, area, line


def _conclusion(problems: Sequence[Problem], place: CheckpointPath) -> str:
    if not problems:
        return "no problem found: it is whole"
    if all(problem.area == METADATA_AREA for problem in problems):
        return f"{counted(len(problems), 'problem')}: megatron-distopt convert {place.path} NEW --to distopt mends it"
    return f"{counted(len(problems), 'problem')}: load an earlier checkpoint"


@dataclass(frozen=True)
class NonFinite:
    """The values in a box of a tensor that are not finite.

    Args:
        index: of the first one in the whole tensor.
        value: inf, -inf or nan.
        count: how many there are in the box.
    """

    index: tuple[int, ...]
    value: float
    count: int


def non_finite(tensor: Tensor, box: Box) -> NonFinite | None:
    """Finds the elements that are inf or nan; returns None where all are finite.

    Args:
        tensor: a part of a larger tensor, of any dtype.
        box: where it lies in that.

    >>> non_finite(torch.tensor([[1.0, math.inf]]), Box((4, 2), (1, 2)))
    NonFinite(index=(4, 3), value=inf, count=1)
    """
    if not tensor.is_floating_point():
        return None
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # float8 cannot be added up
    # inf and nan never leave a sum again, and a sum is one pass without a copy; one that overflows is looked at again.
    if math.isfinite(wide.sum(dtype=torch.float32).item()):
        return None
    mask = torch.isfinite(wide).logical_not_().flatten()
    count = int(mask.sum())
    if not count:
        return None
    first = int(mask.to(torch.uint8).argmax())
    inside = _unravelled(first, tensor.shape)
    index = tuple(offset + step for offset, step in zip(box.offsets, inside, strict=True))
    return NonFinite(index, wide.flatten()[first].item(), count)


def _unravelled(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for numel in reversed(shape):
        flat, at = divmod(flat, numel)
        index.append(at)
    return tuple(reversed(index))
