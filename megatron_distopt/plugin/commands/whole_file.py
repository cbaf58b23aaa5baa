"""One file of a checkpoint against the manifest: its size, its checksum, and the tensors in it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import Chunk, FileRecord, Manifest, kind_of, name_of
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.errors import CheckpointError
from megatron_distopt.plugin.commands.checks import Problem, box_text
from megatron_distopt.plugin.commands.show import counted
from megatron_distopt.plugin.commands.tree import in_order

__all__ = ["Stored", "check_file", "stored_in"]

_PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Stored:
    """A chunk of one file, and the tensor that it is of."""

    key: str
    dtype: str
    chunk: Chunk


def stored_in(manifest: Manifest) -> list[list[Stored]]:
    """For every file what it holds, in the order of its bytes."""
    found: list[list[Stored]] = [[] for _ in manifest.files]
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            found[chunk.file].append(Stored(key, record.dtype, chunk))
    return [sorted(each, key=lambda stored: stored.chunk.start) for each in found]


def check_file(
    path: Path,
    record: FileRecord,
    stored: Sequence[Stored],
    look: Callable[[Stored, Tensor], None],
    progress: Callable[[int], None],
) -> Iterator[Problem]:
    """Reads a file once from the disk; one chunk is in memory at a time.

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
    path: Path, stored: Sequence[Stored], look: Callable[[Stored, Tensor], None], progress: Callable[[int], None]
) -> tuple[int, dict[Stored, str]]:
    """The checksum of all bytes. A chunk is read as a tensor right behind its bytes: they are still in memory."""
    crc32, position = 0, 0
    unreadable: dict[Stored, str] = {}
    with open(path, "rb", buffering=0) as file, TensorReader(path) as reader:
        for each in stored:
            stop = max(position, each.chunk.start + each.chunk.nbytes)
            crc32, position = _crc(file, crc32, stop - position, progress), stop
            try:
                look(each, reader.read(each.key, each.chunk, getattr(torch, each.dtype)))
            except CheckpointError as error:
                unreadable[each] = str(error)
        return _crc(file, crc32, None, progress), unreadable


def _crc(file: io.FileIO, crc32: int, nbytes: int | None, progress: Callable[[int], None]) -> int:
    """Goes on for so many bytes, or to the end."""
    piece = memoryview(bytearray(_PIECE_NBYTES if nbytes is None else max(1, min(_PIECE_NBYTES, nbytes))))
    while nbytes is None or nbytes:
        count = file.readinto(piece if nbytes is None else piece[: min(len(piece), nbytes)])
        if not count:
            break
        crc32 = zlib.crc32(piece[:count], crc32)
        nbytes = None if nbytes is None else nbytes - count
        progress(count)
    return crc32


def _problem(record: FileRecord, said: str, stored: Sequence[Stored], lost: Sequence[Stored]) -> Problem:
    there, by_name = _by_name(stored), _by_name(lost)
    keys = tuple(dict.fromkeys(each.key for each in lost))
    said += f"; {counted(len(by_name), 'param')} damaged:" if lost else "; no tensor in it is damaged"
    lines = (f"{name}{_part(there[name], by_name[name])}" for name in in_order(by_name))
    return Problem("files", record.name, said, keys, tuple(lines))


def _by_name(stored: Sequence[Stored]) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = {}
    for each in stored:
        found.setdefault(name_of(each.key), []).append(each)
    return found


def _part(there: Sequence[Stored], lost: Sequence[Stored]) -> str:
    """Of one param: the box where it is one, and the kinds where some are left in the file."""
    boxes = {each.chunk.box for each in lost}
    kinds = dict.fromkeys(kind_of(each.key) for each in lost)
    said = f" {box_text(boxes.pop())}" if len(boxes) == 1 else ""
    return said if kinds.keys() == {kind_of(each.key) for each in there} else f"{said} of {', '.join(kinds)}"


def _is_whole(path: Path, chunk: Chunk) -> bool:
    """What `torch.save` writes is a zip archive with checksums, which `torch.load` does not look at."""
    with open(path, "rb") as file:
        file.seek(chunk.start)
        data = io.BytesIO(file.read(chunk.nbytes))
    try:
        with zipfile.ZipFile(data) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError):
        return False
