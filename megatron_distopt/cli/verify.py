"""`megatron-distopt verify`: reads a whole checkpoint, and says what is wrong in which file and
param."""

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

from megatron_distopt.checkpoint.folder import check_complete, read_manifest
from megatron_distopt.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, name_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.tensor_file import TensorReader, crc_of_file
from megatron_distopt.cli.checkpoints import find, nbytes_of, params_text
from megatron_distopt.cli.show import (
    Answer,
    Status,
    more,
    plural,
    progress_of,
    rows,
    size_text,
    titled,
)
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any
from megatron_distopt.formats.torch_files import METADATA
from megatron_distopt.layout import Box

#: More problems than this, and more params of a damaged file, are only counted.
_LISTED, _LOST_LISTED = 20, 8
_METADATA_AREA = "metadata"
_Progress = Callable[[int], None]
_Stored = tuple[str, Chunk]  # key of a tensor, and a chunk of it


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint."""

    area: str  # "manifest", "files", "metadata", "tensors" or "values"
    subject: str  # a file, the key of a tensor, or the name of a param
    text: str  # what is wrong; a sentence that begins with the subject
    keys: tuple[str, ...] = ()  # of the tensors that it is about


@dataclass
class _NonFiniteValues:
    # by tensor: value and place of the first one
    first: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # by tensor
    numel: int = 0  # values that were looked at

    def look(self, key: str, tensor: Tensor, box: Box, where: str = "") -> None:
        self.numel += tensor.numel()
        places = non_finite(tensor)
        if len(places):
            in_box = places[0].tolist()
            index = [offset + step for offset, step in zip(box.offsets, in_box, strict=True)]
            self.first.setdefault(key, f"{tensor[tuple(in_box)].item()} at {index}{where}")
            self.counts[key] += len(places)

    def problems(self) -> Iterator[Problem]:
        for key, text in self.first.items():
            rest = (
                f"; {self.counts[key]:,} of its values are not finite"
                if self.counts[key] > 1
                else ""
            )
            yield Problem("values", key, f"holds {text}{rest}", (key,))


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks a whole checkpoint."""
    place = find(parsed.checkpoint)
    checked, problems = (
        _verify_own(place.path) if place.is_ours else _verify_other(open_any(place.path))
    )
    document = {
        "checkpoint": str(place.path),
        "chosen": place.chosen,
        "is_whole": not problems,
        "checked": checked,
        "problems": [*map(asdict, problems)],
    }
    verdict = "no problem found: it is whole"
    if problems:
        remedy = "load an earlier checkpoint"
        if {problem.area for problem in problems} == {_METADATA_AREA}:
            remedy = f"megatron-distopt convert {place.path} NEW --to distopt mends it"
        verdict = f"{plural(len(problems), 'problem')}: {remedy}"
    head = titled("checkpoint", rows([("where", str(place.path)), ("which", place.chosen)]))
    parts: list[RenderableType] = [head, rows(_rows(checked, problems)), Text(verdict)]
    return Answer(document, parts, status=int(bool(problems)))


def _rows(
    checked: Mapping[str, str], problems: Sequence[Problem]
) -> Iterator[tuple[str, str, str]]:
    for area in ("manifest", *checked):
        of_area = [problem for problem in problems if problem.area == area]
        if not of_area and area in checked:
            yield Status.OK.value, area, checked[area]
        for problem in of_area[:_LISTED]:
            lost = params_text(problem.keys if area == "files" else ())
            lines = [
                f"{problem.subject} {problem.text}",
                *lost[:_LOST_LISTED],
                *more(len(lost), _LOST_LISTED),
            ]
            yield Status.PROBLEM.value, area, "\n".join(lines)
        for line in more(len(of_area), _LISTED):
            yield Status.PROBLEM.value, area, line


def _verify_own(folder: Path) -> tuple[dict[str, str], list[Problem]]:
    """Returns what was looked at, by area, which is well where no problem is of that area; and all
    problems."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return {}, [Problem("manifest", "manifest.json", f"cannot be used: {error}")]
    values, problems = _NonFiniteValues(), list[Problem]()
    with progress_of("verifying", manifest.nbytes) as progress:
        for file, stored in zip(manifest.files, stored_in(manifest), strict=True):
            problems += _check_file(folder / file.name, file, stored, manifest, values, progress)
    try:
        check_complete(manifest)
    except CheckpointError as error:
        problems.append(Problem("tensors", "manifest.json", str(error)))
    text = "has no checksum in the manifest"
    if manifest.metadata is not None:
        text = _fault(folder / METADATA, manifest.metadata)
    if text:
        text += ": torch alone cannot rely on it, loading by megatron-distopt needs none"
        problems.append(Problem(_METADATA_AREA, METADATA, text))
    files = (
        f"{plural(len(manifest.files), 'file')}, {size_text(manifest.nbytes)}: sizes and checksums "
        "are right"
    )
    of_files = {
        "files": files,
        _METADATA_AREA: "size and checksum are right: torch alone can read it",
    }
    return {**of_files, **_checked(manifest.tensors, values)}, [*problems, *values.problems()]


def _verify_other(source: Source) -> tuple[dict[str, str], list[Problem]]:
    values, problems = _NonFiniteValues(), list[Problem]()
    with progress_of("verifying", sum(map(nbytes_of, source.tensors.values()))) as progress:
        for key, info in source.tensors.items():
            try:
                tensor = source.read(key)
            except CheckpointError as error:
                problems.append(Problem("tensors", key, f"cannot be read: {error}", (key,)))
                continue
            values.look(key, tensor, Box.whole(info.shape))
            progress(nbytes_of(info))
    return _checked(source.tensors, values), [*problems, *values.problems()]


def _checked(tensors: Mapping[str, TensorRecord], values: _NonFiniteValues) -> dict[str, str]:
    numel = sum(math.prod(info.shape) for info in tensors.values())
    read = "" if numel == values.numel else f" of {numel:,} could be read"
    num_params = plural(len({name_of(key) for key in tensors}), "param")
    return {
        "tensors": f"{plural(len(tensors), 'tensor')} of {num_params}: each element has one place",
        "values": f"{plural(values.numel, 'value')}{read}: all finite",
    }


# --- files and values


def stored_in(manifest: Manifest) -> list[list[_Stored]]:
    """Returns the chunks of every file, in the order of its bytes."""
    found: list[list[_Stored]] = [[] for _ in manifest.files]
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            found[chunk.file].append((key, chunk))
    return [sorted(stored, key=lambda each: each[1].start) for stored in found]


def _check_file(
    path: Path,
    record: FileRecord,
    stored: Sequence[_Stored],
    manifest: Manifest,
    values: _NonFiniteValues,
    progress: _Progress,
) -> Iterator[Problem]:
    """Checks a file, and then looks at its values with one chunk in memory at a time."""
    if text := _fault(path, (record.nbytes, record.crc32)):
        keys = tuple(dict.fromkeys(key for key, _ in stored))
        params = plural(len(set(map(name_of, keys))), "param")
        yield Problem("files", record.name, f"{text}; it has a part of {params}:", keys)
        progress(record.nbytes)
        return
    with TensorReader(path) as reader:
        for key, chunk in stored:
            try:
                tensor = reader.read(key, chunk, getattr(torch, manifest.tensors[key].dtype))
            except CheckpointError as error:
                yield Problem("tensors", key, f"cannot be read: {error}", (key,))
            else:
                values.look(key, tensor, chunk.box, f" in {path.name}")
            progress(chunk.nbytes)


def _fault(path: Path, wanted: tuple[int, int]) -> str:
    """Says what is wrong with a file; empty where bytes and CRC-32 are as wanted."""
    try:
        if (nbytes := path.stat().st_size) != wanted[0]:
            return f"has {nbytes:,} bytes, not {wanted[0]:,}"
        crc32 = crc_of_file(path)
    except OSError as error:
        return (
            "is missing"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read: {error.strerror}"
        )
    return "" if crc32 == wanted[1] else f"has CRC-32 {crc32:08x}, not {wanted[1]:08x}"


def non_finite(tensor: Tensor) -> Tensor:
    """Returns the indices of the elements that are inf or nan, int64 [count, dimensions]."""
    none = torch.empty(0, tensor.dim(), dtype=torch.int64)
    if not tensor.is_floating_point():
        return none
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # float8 cannot be added up
    # inf and nan never leave a sum again, and a sum is one pass without a copy; one that overflows
    # is looked at again.
    if math.isfinite(wide.sum(dtype=torch.float32).item()):
        return none
    return torch.isfinite(wide).logical_not_().nonzero()
