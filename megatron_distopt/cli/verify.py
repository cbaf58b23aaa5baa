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
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import MAIN, Chunk, FileRecord, Manifest, kind_of, name_of
from megatron_distopt.checkpoint.owned_state import is_owned
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import Source, TensorInfo
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.cli.checkpoints import CheckpointPath, find, in_order, kinds_by_name, nbytes_of
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


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint."""

    area: str  # "manifest", "files", "metadata", "tensors", "values" or "groups"
    subject: str  # a file, the key of a tensor, or the name of a param
    text: str  # what is wrong; a sentence that begins with the subject
    keys: tuple[str, ...] = ()  # of all tensors that are damaged, where that is known
    lost: tuple[str, ...] = ()  # the damaged params for people, one line each


@dataclass
class _NonFiniteValues:
    """The values that are not finite: the first place in every tensor, and their number."""

    first: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    numel: int = 0

    def look(self, key: str, tensor: Tensor, box: Box, where: str = "") -> None:
        """Looks at the values of one box of a tensor."""
        self.numel += tensor.numel()
        places = non_finite(tensor)
        if len(places):
            in_box = places[0].tolist()
            index = [offset + step for offset, step in zip(box.offsets, in_box, strict=True)]
            self.first.setdefault(key, f"{tensor[tuple(in_box)].item()} at {index}{where}")
            self.counts[key] += len(places)

    def problems(self) -> Iterator[Problem]:
        """Yields one problem for each tensor with such values."""
        for key, text in self.first.items():
            rest = f"; {self.counts[key]:,} of its values are not finite" if self.counts[key] > 1 else ""
            yield Problem("values", key, f"holds {text}{rest}", (key,))


def answer(parsed: argparse.Namespace) -> Answer:
    """Checks a whole checkpoint.

    Raises:
        CheckpointError: the path holds none.
    """
    place = find(parsed.checkpoint)
    checked, problems = _verify_own(place.path) if place.is_ours else _verify_other(open_any(place.path))
    document = {
        "checkpoint": str(place.path),
        "chosen": place.chosen,
        "is_whole": not problems,
        "checked": checked,
        "problems": [*map(asdict, problems)],
    }
    head = titled("checkpoint", rows([("where", str(place.path)), ("which", place.chosen)]))
    parts: list[RenderableType] = [head, rows(_rows(checked, problems)), Text(_conclusion(problems, place))]
    return Answer(document, parts, status=1 if problems else 0)


def _verify_own(folder: Path) -> tuple[dict[str, str], list[Problem]]:
    """Returns what was looked at, by area, which is well where no problem is of that area; and all problems."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return {}, [Problem("manifest", "manifest.json", f"cannot be used: {error}")]
    values, problems = _NonFiniteValues(), list[Problem]()
    with progress_of("verifying", manifest.nbytes) as progress:
        for file, stored in zip(manifest.files, stored_in(manifest), strict=True):
            problems += _check_file(folder / file.name, file, stored, values, progress)
    damaged = {key for problem in problems for key in problem.keys}
    problems += [*check_chunks(manifest), *_check_metadata(folder, manifest)]
    infos = {key: TensorInfo(record.shape, record.dtype) for key, record in manifest.tensors.items()}
    checked, of_content = _check_content(infos, manifest.groups, values)
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


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of one file, with the key and dtype of its tensor."""

    key: str
    dtype: str
    chunk: Chunk


def stored_in(manifest: Manifest) -> list[list[StoredChunk]]:
    """Returns the chunks of every file, in the order of its bytes."""
    found: list[list[StoredChunk]] = [[] for _ in manifest.files]
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            found[chunk.file].append(StoredChunk(key, record.dtype, chunk))
    return [sorted(each, key=lambda stored: stored.chunk.start) for each in found]


def _check_file(
    path: Path, record: FileRecord, stored: Sequence[StoredChunk], values: _NonFiniteValues, progress: _Progress
) -> Iterator[Problem]:
    """Checks one file against the manifest; reads it once, with one chunk in memory at a time."""
    try:
        nbytes = path.stat().st_size
        crc32, unreadable = _read(path, stored, values, progress)
    except OSError as error:
        text = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        yield _file_problem(record, text, stored, stored)
        return
    text = _mismatch((nbytes, crc32), (record.nbytes, record.crc32))
    if text:
        lost = [each for each in stored if each in unreadable or not _is_whole(path, each.chunk)]
        yield _file_problem(record, text, stored, lost)
        return
    for each, reason in unreadable.items():
        yield Problem("tensors", each.key, f"cannot be read: {reason}", (each.key,))


def _read(
    path: Path, stored: Sequence[StoredChunk], values: _NonFiniteValues, progress: _Progress
) -> tuple[int, dict[StoredChunk, str]]:
    """Returns the checksum of all bytes, and the chunks that cannot be read.

    A chunk is read as a tensor right after its bytes, which the page cache then still has.
    """
    crc32, position, unreadable = 0, 0, dict[StoredChunk, str]()
    with open(path, "rb", buffering=0) as file, TensorReader(path) as reader:

        def checksum(nbytes: float) -> int:
            """Continues the checksum over so many bytes, or to the end of the file."""
            found = crc32
            while nbytes > 0 and (piece := file.read(int(min(_PIECE_NBYTES, nbytes)))):
                found, nbytes = zlib.crc32(piece, found), nbytes - len(piece)
                progress(len(piece))
            return found

        for each in stored:
            stop = max(position, each.chunk.start + each.chunk.nbytes)
            crc32, position = checksum(stop - position), stop
            try:
                tensor = reader.read(each.key, each.chunk, getattr(torch, each.dtype))
            except CheckpointError as error:
                unreadable[each] = str(error)
            else:
                where = f", in chunk {box_text(each.chunk.box)} in {path.name}"
                values.look(each.key, tensor, each.chunk.box, where)
        return checksum(math.inf), unreadable


def _file_problem(record: FileRecord, text: str, stored: Sequence[StoredChunk], lost: Sequence[StoredChunk]) -> Problem:
    """Names every damaged param: its box where there is one, its kinds where others of it are intact."""
    intact = {each.key for each in stored} - {each.key for each in lost}
    boxes, kinds = dict[str, set[Box]](), dict[str, dict[str, None]]()
    for each in lost:
        boxes.setdefault(name_of(each.key), set()).add(each.chunk.box)
        kinds.setdefault(name_of(each.key), {})[kind_of(each.key)] = None
    partly, lines = {name_of(key) for key in intact}, list[str]()
    for name in in_order(boxes):
        line = f"{name} {box_text(*boxes[name])}" if len(boxes[name]) == 1 else name
        lines.append(f"{line} of {', '.join(kinds[name])}" if name in partly else line)
    text += f"; {plural(len(boxes), 'param')} damaged:" if lost else "; no tensor in it is damaged"
    return Problem("files", record.name, text, tuple(dict.fromkeys(each.key for each in lost)), tuple(lines))


def box_text(box: Box) -> str:
    """Writes a box as a Python slice.

    >>> box_text(Box((0, 6), (2, 3)))
    '[0:2, 6:9]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.offsets, box.stops, strict=True))}]"


def _is_whole(path: Path, chunk: Chunk) -> bool:
    """Checks the zip checksums of a chunk, which `torch.save` writes and `torch.load` does not look at."""
    with open(path, "rb") as file:
        file.seek(chunk.start)
        data = io.BytesIO(file.read(chunk.nbytes))
    try:
        with zipfile.ZipFile(data) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError):
        return False


def _check_metadata(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Checks that torch alone can read the checkpoint."""
    try:
        content = (folder / METADATA).read_bytes()
    except OSError as error:
        text = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    else:
        if manifest.metadata is None:
            text = "has no checksum in the manifest"
        else:
            text = _mismatch((len(content), zlib.crc32(content)), manifest.metadata)
    if text:
        text += ": torch alone cannot rely on it, loading by megatron-distopt needs none"
        yield Problem(_METADATA_AREA, METADATA, text)


def _mismatch(found: tuple[int, int], wanted: tuple[int, int]) -> str:
    """Says how bytes and CRC-32 of a file differ; empty where they do not."""
    if found[0] != wanted[0]:
        return f"has {found[0]:,} bytes, not {wanted[0]:,}"
    return "" if found[1] == wanted[1] else f"has CRC-32 {found[1]:08x}, not {wanted[1]:08x}"


# --- tensors, values and param groups


def check_chunks(manifest: Manifest) -> Iterator[Problem]:
    """Checks that the chunks of every tensor cover it; that they are disjoint is a condition for reading a manifest."""
    for key, record in manifest.tensors.items():
        numel, wanted = sum(chunk.box.numel for chunk in record.chunks), math.prod(record.shape)
        if numel != wanted:
            text = f"is not complete: {numel:,} of {plural(wanted, 'element')} were saved"
            yield Problem("tensors", key, text, (key,))


def _check_content(
    tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord], values: _NonFiniteValues
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


def _check_kinds(tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Checks that every param has its values, and the same optimizer state as most others of its group."""
    kinds = kinds_by_name({key: info for key, info in tensors.items() if not is_owned(key)})
    for name, infos in kinds.items():
        shapes = {kind: list(info.shape) for kind, info in infos.items()}
        if MAIN not in infos:
            yield Problem("tensors", name, f"has {', '.join(infos)} and no {MAIN}")
        elif any(shape != shapes[MAIN] for shape in shapes.values()):
            yield Problem("tensors", name, f"has shapes that differ: {options_text(shapes)}")
    for number, group in enumerate(groups):
        members = {name: kinds[name] for name in group.names if name in kinds}
        states = {
            name: ", ".join(f"{kind} in {info.dtype}" for kind, info in infos.items() if kind != MAIN) or "nothing"
            for name, infos in members.items()
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
    """Returns the indices of the elements that are inf or nan, int64 [count, dimensions].

    >>> non_finite(torch.tensor([[1.0, math.inf]])).tolist()
    [[0, 1]]
    """
    none = torch.empty(0, tensor.dim(), dtype=torch.int64)
    if not tensor.is_floating_point():
        return none
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # float8 cannot be added up
    # inf and nan never leave a sum again, and a sum is one pass without a copy; one that overflows is looked at again.
    if math.isfinite(wide.sum(dtype=torch.float32).item()):
        return none
    return torch.isfinite(wide).logical_not_().nonzero()


# --- for people


def _rows(checked: Mapping[str, str], problems: Sequence[Problem]) -> Iterator[tuple[str, str, str]]:
    for area in ("manifest", *checked):
        of_area = [problem for problem in problems if problem.area == area]
        if not of_area and area in checked:
            yield Status.OK.value, area, checked[area]
        for problem in of_area[:_LISTED]:
            lost = [*problem.lost[:_LOST_LISTED], *more(len(problem.lost), _LOST_LISTED)]
            yield Status.PROBLEM.value, area, "\n".join([f"{problem.subject} {problem.text}", *lost])
        for line in more(len(of_area), _LISTED):
            yield Status.PROBLEM.value, area, line


def _conclusion(problems: Sequence[Problem], place: CheckpointPath) -> str:
    if not problems:
        return "no problem found: it is whole"
    if all(problem.area == _METADATA_AREA for problem in problems):
        return f"{plural(len(problems), 'problem')}: megatron-distopt convert {place.path} NEW --to distopt mends it"
    return f"{plural(len(problems), 'problem')}: load an earlier checkpoint"
