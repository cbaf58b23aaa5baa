"""`megatron-distopt verify`: reads every byte of a checkpoint once, and says what is wrong in which file and param."""

from __future__ import annotations

import argparse
import io
import math
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import MAIN, Chunk, FileRecord, Manifest, TensorRecord, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.tensor_file import TensorReader, crc_of_file
from megatron_distopt.checkpoint.whole_model import is_owned
from megatron_distopt.cli.checkpoints import by_param, find, in_order, nbytes_of, params_text
from megatron_distopt.cli.show import Answer, Status, more, options_text, plural, progress_of, rows, size_text, titled
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any
from megatron_distopt.formats.torch_files import METADATA
from megatron_distopt.layout import Box

#: More problems than this, and more params lost by one, are only counted.
_LISTED, _LOST_LISTED = 20, 8
_PIECE_NBYTES = 1 << 20
_METADATA_AREA = "metadata"
_Progress = Callable[[int], None]
_Stored = tuple[str, Chunk]  # key of a tensor, and a chunk of it


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint."""

    area: str  # "manifest", "files", "metadata", "tensors", "values" or "groups"
    subject: str  # a file, the key of a tensor, or the name of a param
    text: str  # what is wrong; a sentence that begins with the subject
    keys: tuple[str, ...] = ()  # of all tensors that are damaged, where that is known


@dataclass
class _NonFiniteValues:
    first: dict[str, str] = field(default_factory=dict)  # by tensor: value and place of the first one
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
            rest = f"; {self.counts[key]:,} of its values are not finite" if self.counts[key] > 1 else ""
            yield Problem("values", key, f"holds {text}{rest}", (key,))


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks a whole checkpoint."""
    place = find(parsed.checkpoint)
    checked, problems = _verify_own(place.path) if place.is_ours else _verify_other(open_any(place.path))
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


def _rows(checked: Mapping[str, str], problems: Sequence[Problem]) -> Iterator[tuple[str, str, str]]:
    for area in ("manifest", *checked):
        of_area = [problem for problem in problems if problem.area == area]
        if not of_area and area in checked:
            yield Status.OK.value, area, checked[area]
        for problem in of_area[:_LISTED]:
            lost = params_text(problem.keys if area == "files" else ())
            lines = [f"{problem.subject} {problem.text}", *lost[:_LOST_LISTED], *more(len(lost), _LOST_LISTED)]
            yield Status.PROBLEM.value, area, "\n".join(lines)
        for line in more(len(of_area), _LISTED):
            yield Status.PROBLEM.value, area, line


def _verify_own(folder: Path) -> tuple[dict[str, str], list[Problem]]:
    """Returns what was looked at, by area, which is well where no problem is of that area; and all problems."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return {}, [Problem("manifest", "manifest.json", f"cannot be used: {error}")]
    values, problems = _NonFiniteValues(), list[Problem]()
    with progress_of("verifying", manifest.nbytes) as progress:
        for file, stored in zip(manifest.files, stored_in(manifest), strict=True):
            problems += _check_file(folder / file.name, file, stored, manifest, values, progress)
    damaged = {key for problem in problems for key in problem.keys}
    problems += check_chunks(manifest)
    text = "has no checksum in the manifest"
    if manifest.metadata is not None:
        text = _fault(folder / METADATA, manifest.metadata, partial(crc_of_file, folder / METADATA))
    if text:
        text += ": torch alone cannot rely on it, loading by megatron-distopt needs none"
        problems.append(Problem(_METADATA_AREA, METADATA, text))
    checked, of_content = _check_content(manifest.tensors, manifest.groups, values)
    problems += [each for each in of_content if not (each.area == "values" and each.subject in damaged)]
    files = f"{plural(len(manifest.files), 'file')}, {size_text(manifest.nbytes)}: sizes and checksums are right"
    return {"files": files, _METADATA_AREA: "size and checksum are right: torch alone can read it", **checked}, problems


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
    checked, of_content = _check_content(source.tensors, source.head.groups, values)
    return checked, [*problems, *of_content]


# --- files


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
    """Checks a file, and looks at its values; reads it once, with one chunk in memory at a time."""
    unreadable: dict[_Stored, str] = {}

    def checksum() -> int:
        crc32 = 0
        with open(path, "rb") as file, TensorReader(path) as reader:
            for key, chunk in stored:
                crc32 = _crc_up_to(chunk.start + chunk.nbytes, file, crc32, progress)
                try:  # right after its bytes, which the page cache then still has
                    tensor = reader.read(key, chunk, getattr(torch, manifest.tensors[key].dtype))
                except CheckpointError as error:
                    unreadable[key, chunk] = str(error)
                else:
                    values.look(key, tensor, chunk.box, f" in {path.name}")
            return _crc_up_to(math.inf, file, crc32, progress)

    text = _fault(path, (record.nbytes, record.crc32), checksum)
    if not text:
        for (key, _), reason in unreadable.items():
            yield Problem("tensors", key, f"cannot be read: {reason}", (key,))
        return
    lost = [each for each in stored if each in unreadable or not _is_whole(path, each[1])]
    keys = tuple(dict.fromkeys(key for key, _ in lost))
    params = plural(len(set(map(name_of, keys))), "param")
    text += f"; {params} damaged:" if lost else "; no tensor in it is damaged"
    yield Problem("files", record.name, text, keys)


def _crc_up_to(stop: float, file: BinaryIO, crc32: int, progress: _Progress) -> int:
    """Continues a checksum up to a byte of the file, or to its end."""
    while (left := stop - file.tell()) > 0 and (piece := file.read(int(min(_PIECE_NBYTES, left)))):
        crc32 = zlib.crc32(piece, crc32)
        progress(len(piece))
    return crc32


def _fault(path: Path, wanted: tuple[int, int], checksum: Callable[[], int]) -> str:
    """Says what is wrong with a file; empty where bytes and CRC-32 are as wanted."""
    try:
        nbytes, crc32 = path.stat().st_size, checksum()
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    if nbytes != wanted[0]:
        return f"has {nbytes:,} bytes, not {wanted[0]:,}"
    return "" if crc32 == wanted[1] else f"has CRC-32 {crc32:08x}, not {wanted[1]:08x}"


def _is_whole(path: Path, chunk: Chunk) -> bool:
    """Checks the zip checksums of a chunk, which `torch.save` writes and `torch.load` does not look at."""
    try:
        with open(path, "rb") as file:
            file.seek(chunk.start)
            data = io.BytesIO(file.read(chunk.nbytes))
        with zipfile.ZipFile(data) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError):
        return False


# --- tensors, values and param groups


def check_chunks(manifest: Manifest) -> Iterator[Problem]:
    """Checks that the chunks of every tensor cover it; that they are disjoint is a condition for reading a manifest."""
    for key, record in manifest.tensors.items():
        numel, wanted = sum(chunk.box.numel for chunk in record.chunks), math.prod(record.shape)
        if numel != wanted:
            text = f"is not complete: {numel:,} of {plural(wanted, 'element')} were saved"
            yield Problem("tensors", key, text, (key,))


def _check_content(
    tensors: Mapping[str, TensorRecord], groups: Sequence[GroupRecord], values: _NonFiniteValues
) -> tuple[dict[str, str], list[Problem]]:
    params = {name_of(key) for key in tensors}
    numel = sum(math.prod(info.shape) for info in tensors.values())
    read = "" if numel == values.numel else f" of {numel:,} could be read"
    checked = {
        "tensors": f"{plural(len(tensors), 'tensor')} of {plural(len(params), 'param')}: each element has one place",
        "values": f"{plural(values.numel, 'value')}{read}: all finite",
        "groups": f"{plural(len(groups), 'group')}: each param is in one, with the same state as the others in it",
    }
    return checked, [*_check_kinds(tensors, groups), *values.problems(), *_check_groups(params, groups)]


def _check_kinds(tensors: Mapping[str, TensorRecord], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Checks that every param has its values, and the same optimizer state as most others of its group."""
    kinds = by_param({key: info for key, info in tensors.items() if not is_owned(key)})
    for name, infos in kinds.items():
        shapes = {kind: list(info.shape) for kind, info in infos.items()}
        if MAIN not in infos:
            yield Problem("tensors", name, f"has {', '.join(infos)} and no {MAIN}")
        elif any(shape != shapes[MAIN] for shape in shapes.values()):
            yield Problem("tensors", name, f"has shapes that differ: {options_text(shapes)}")
    for number, group in enumerate(groups):
        states = {
            name: ", ".join(f"{kind} in {info.dtype}" for kind, info in infos.items() if kind != MAIN) or "nothing"
            for name, infos in ((name, kinds[name]) for name in group.names if name in kinds)
            # Without a count of updates there may have been none, and a param that never had a gradient has no state.
            if group.step is not None or infos.keys() != {MAIN}
        }
        usual = Counter(states.values()).most_common(1)[0][0] if states else ""
        for name, state in states.items():
            if state != usual:
                yield Problem("groups", name, f"has {state} as its state, where others of group {number} have {usual}")


def _check_groups(params: set[str], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Checks that every param is in one group, and that every param of a group has a tensor."""
    found: dict[str, list[str]] = {name: [] for name in in_order(params)}
    for number, group in enumerate(groups):
        for name in group.names:
            if name in found:
                found[name].append(str(number))
            else:
                yield Problem("groups", name, f"is in group {number} and has no tensor")
    for name, numbers in found.items():
        if len(numbers) != 1:
            text = f"is in groups {' and '.join(numbers)}" if numbers else "is in no group"
            yield Problem("groups", name, text)


def non_finite(tensor: Tensor) -> Tensor:
    """Returns the indices of the elements that are inf or nan, int64 [count, dimensions]."""
    none = torch.empty(0, tensor.dim(), dtype=torch.int64)
    if not tensor.is_floating_point():
        return none
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # float8 cannot be added up
    # inf and nan never leave a sum again, and a sum is one pass without a copy; one that overflows is looked at again.
    if math.isfinite(wide.sum(dtype=torch.float32).item()):
        return none
    return torch.isfinite(wide).logical_not_().nonzero()
