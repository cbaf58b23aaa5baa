"""Checks of a checkpoint: its files, its tensors, its param groups, and its `.metadata` for torch."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Chunk,
    FileRecord,
    Manifest,
    kind_of,
    metadata_of,
    name_of,
)
from megatron_distopt.checkpoint.owned_state import is_owned
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.cli.checkpoints import in_order, kinds_by_name
from megatron_distopt.cli.show import counted, options_text
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.torch.dcp_reader import METADATA, open_dcp
from megatron_distopt.layout import Box


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint.

    Args:
        area: "manifest", "files", "metadata", "tensors", "values" or "groups".
        subject: a file, the key of a tensor, or the name of a param.
        text: what is wrong; a sentence that begins with the subject.
        keys: keys of all tensors that are damaged, where that is known.
        lost: the damaged params for people, one line each.
    """

    area: str
    subject: str
    text: str
    keys: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def box_text(box: Box) -> str:
    """Writes a box as a Python slice.

    >>> box_text(Box((0, 6), (2, 3)))
    '[0:2, 6:9]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.offsets, box.stops, strict=True))}]"


def check_chunks(manifest: Manifest) -> Iterator[Problem]:
    """Checks that the chunks of every tensor cover it; that they are disjoint is a condition for reading a manifest."""
    for key, record in manifest.tensors.items():
        numel, wanted = sum(chunk.box.numel for chunk in record.chunks), math.prod(record.shape)
        if numel != wanted:
            said = f"is not complete: {numel:,} of {counted(wanted, 'element')} were saved"
            yield Problem("tensors", key, said, (key,))


def check_kinds(tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Checks that every param has its values, and the same optimizer state as the others of its group."""
    kinds = kinds_by_name({key: info for key, info in tensors.items() if not is_owned(key)})
    for name, infos in kinds.items():
        shapes = {kind: list(info.shape) for kind, info in infos.items()}
        if MAIN not in infos:
            yield Problem("tensors", name, f"has {', '.join(infos)} and no {MAIN}")
        elif any(shape != shapes[MAIN] for shape in shapes.values()):
            yield Problem("tensors", name, f"has shapes that differ: {options_text(shapes)}")
    for number, group in enumerate(groups):
        members = {name: kinds[name] for name in group.names if name in kinds}
        # Without a count of updates there may have been none, and a param that never had a gradient has no state.
        begun = {name: infos for name, infos in members.items() if group.step is not None or infos.keys() != {MAIN}}
        yield from _check_alike(number, begun)


def _check_alike(number: int, members: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[Problem]:
    """Compares each param with most params of its group."""
    looks = {name: _look(infos) for name, infos in members.items()}
    usual = Counter(looks.values()).most_common(1)[0][0] if looks else ""
    for name, look in looks.items():
        if look != usual:
            yield Problem("groups", name, f"has {look} as its state, where others of group {number} have {usual}")


def _look(infos: Mapping[str, TensorInfo]) -> str:
    return ", ".join(f"{kind} in {info.dtype}" for kind, info in infos.items() if kind != MAIN) or "nothing"


def check_groups(tensors: Mapping[str, TensorInfo], groups: Sequence[GroupRecord]) -> Iterator[Problem]:
    """Checks that every param is in one group, and that every param of a group has a tensor."""
    found: dict[str, list[int]] = {name_of(key): [] for key in tensors}
    for number, group in enumerate(groups):
        for name in group.names:
            if name in found:
                found[name].append(number)
            else:
                yield Problem("groups", name, f"is in group {number} and has no tensor")
    for name, numbers in found.items():
        if not numbers:
            yield Problem("groups", name, "is in no group")
        elif len(numbers) > 1:
            yield Problem("groups", name, f"is in groups {' and '.join(map(str, numbers))}")


_PIECE_NBYTES = 1 << 20


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


def check_file(
    path: Path,
    record: FileRecord,
    stored: Sequence[StoredChunk],
    look: Callable[[StoredChunk, Tensor], None],
    progress: Callable[[int], None],
) -> Iterator[Problem]:
    """Checks one file against the manifest; reads it once, with one chunk in memory at a time.

    Args:
        path: of the file.
        record: what the manifest says about it.
        stored: what it should hold, in the order of its bytes.
        look: called with every tensor that could be read.
        progress: called with the bytes that were read.
    """
    try:
        nbytes = path.stat().st_size
        crc32, unreadable = _read(path, stored, look, progress)
    except OSError as error:
        said = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        yield _problem(record, said, stored, stored)
        return
    if nbytes != record.nbytes or crc32 != record.crc32:
        said = f"has CRC-32 {crc32:08x}, not {record.crc32:08x}"
        if nbytes != record.nbytes:
            said = f"has {nbytes:,} bytes, not {record.nbytes:,}"
        lost = [each for each in stored if each in unreadable or not _is_whole(path, each.chunk)]
        yield _problem(record, said, stored, lost)
        return
    for each, reason in unreadable.items():
        yield Problem("tensors", each.key, f"cannot be read: {reason}", (each.key,))


def _read(
    path: Path,
    stored: Sequence[StoredChunk],
    look: Callable[[StoredChunk, Tensor], None],
    progress: Callable[[int], None],
) -> tuple[int, dict[StoredChunk, str]]:
    """Returns the checksum of all bytes, and the chunks that cannot be read.

    A chunk is read as a tensor right after its bytes, which the page cache then still has.
    """
    crc32, position = 0, 0
    unreadable: dict[StoredChunk, str] = {}
    with open(path, "rb", buffering=0) as file, TensorReader(path) as reader:
        for each in stored:
            stop = max(position, each.chunk.start + each.chunk.nbytes)
            crc32, position = _crc(file, crc32, stop - position, progress), stop
            try:
                look(each, reader.read(each.key, each.chunk, getattr(torch, each.dtype)))
            except CheckpointError as error:
                unreadable[each] = str(error)
        return _crc(file, crc32, math.inf, progress), unreadable


def _crc(file: io.FileIO, crc32: int, nbytes: float, progress: Callable[[int], None]) -> int:
    """Continues a checksum over so many bytes, or to the end of the file."""
    while nbytes > 0 and (piece := file.read(int(min(_PIECE_NBYTES, nbytes)))):
        crc32, nbytes = zlib.crc32(piece, crc32), nbytes - len(piece)
        progress(len(piece))
    return crc32


def _problem(record: FileRecord, said: str, stored: Sequence[StoredChunk], lost: Sequence[StoredChunk]) -> Problem:
    there, by_name = _by_name(stored), _by_name(lost)
    keys = tuple(dict.fromkeys(each.key for each in lost))
    said += f"; {counted(len(by_name), 'param')} damaged:" if lost else "; no tensor in it is damaged"
    lines = (f"{name}{_part(there[name], by_name[name])}" for name in in_order(by_name))
    return Problem("files", record.name, said, keys, tuple(lines))


def _by_name(stored: Sequence[StoredChunk]) -> dict[str, list[StoredChunk]]:
    found: dict[str, list[StoredChunk]] = {}
    for each in stored:
        found.setdefault(name_of(each.key), []).append(each)
    return found


def _part(there: Sequence[StoredChunk], lost: Sequence[StoredChunk]) -> str:
    """Says which part of a param is damaged: its box where there is one, its kinds where others are intact."""
    boxes = {each.chunk.box for each in lost}
    kinds = dict.fromkeys(kind_of(each.key) for each in lost)
    said = f" {box_text(boxes.pop())}" if len(boxes) == 1 else ""
    return said if kinds.keys() == {kind_of(each.key) for each in there} else f"{said} of {', '.join(kinds)}"


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


METADATA_AREA = "metadata"


def check_metadata(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Checks that torch alone can read the checkpoint, and would read the same; yields at most one problem."""
    fault = _fault(folder, manifest)
    if fault:
        said = f"{fault}: torch alone cannot rely on it, loading by megatron-distopt needs none"
        yield Problem(METADATA_AREA, METADATA, said)


def _fault(folder: Path, manifest: Manifest) -> str:
    try:
        content = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if manifest.metadata is None:  # the manifest is older than its checksum of this file
        return "" if content == metadata_of(manifest) else _difference_in_content(folder, manifest)
    nbytes, crc32 = manifest.metadata
    if len(content) != nbytes:
        return f"has {len(content):,} bytes, not {nbytes:,}"
    found = zlib.crc32(content)
    return "" if found == crc32 else f"has CRC-32 {found:08x}, not {crc32:08x}"


def _difference_in_content(folder: Path, manifest: Manifest) -> str:
    """Compares shape, dtype, and the file and bytes of every box; another torch writes the same in other bytes."""
    try:
        there = {
            key: (each.shape, dtype_name(each.dtype), {(chunk.box, *astuple(chunk.stored)) for chunk in each.chunks})
            for key, each in open_dcp(folder).tensors.items()
        }
    except CheckpointError as error:
        return f"cannot be used: {error}"
    files = [file.name for file in manifest.files]
    wanted = {
        key: (
            each.shape,
            each.dtype,
            {(chunk.box, files[chunk.file], chunk.start, chunk.nbytes) for chunk in each.chunks},
        )
        for key, each in manifest.tensors.items()
    }
    differing = [key for key in {**wanted, **there} if there.get(key) != wanted.get(key)]
    return f"says something else of {differing[0]} than the manifest" if differing else ""
