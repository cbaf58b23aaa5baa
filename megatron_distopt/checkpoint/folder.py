"""A checkpoint's folder, and how a save becomes the checkpoint in it: all or nothing, in one step.

::

    manifest.json            names every other file; there is a checkpoint where this file is
    SAVE_ID-00000.distcp     the tensors of rank 0; one file a rank
    .metadata                the manifest for torch's own reader; this package never reads it
    saving.lock              locked by a run while it saves

[Note: commit] A save writes files under names of its own, in the folder of the checkpoint that it will replace. Each is
on the disk (fsync) before the manifest is written, as SAVE_ID-manifest.json.new. `os.replace` of that is the moment in
which the new checkpoint takes the place of the old one. Only then are the old files removed. A crash at any time leaves
the old manifest with the old files or the new one with the new files, and the next save removes what belongs to
neither. A save that fails after that moment, because a rank died or the user interrupts it, is committed all the same:
`withdraw` leaves what the manifest names.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.dcp import metadata_of
from megatron_distopt.checkpoint.manifest import (
    FileRecord,
    Manifest,
    TensorRecord,
    check_written,
    from_text,
    join,
    overlap,
    to_text,
)
from megatron_distopt.errors import CheckpointError, refusal

MANIFEST = "manifest.json"
_METADATA, _LOCK, _NEW = ".metadata", "saving.lock", ".new"
_DATA, _PART, _FAILED = ".distcp", ".part", ".failed"
#: Names of files of a save. Other files in the folder are never touched.
_OF_A_SAVE = re.compile(r"[0-9a-f]{8}-.+\.(distcp|part|new|failed)")


def new_save_id() -> str:
    """An id that is different for every save; it is in the names of the save's files."""
    return secrets.token_hex(4)


def data_file(folder: Path, save_id: str, rank: int) -> Path:
    """The file into which a rank writes its tensors."""
    return folder / f"{save_id}-{rank:05d}{_DATA}"


def _part_file(folder: Path, save_id: str, rank: int) -> Path:
    return folder / f"{save_id}-{rank:05d}{_PART}"


def _new_file(folder: Path, save_id: str, name: str) -> Path:
    return folder / f"{save_id}-{name}{_NEW}"


def lock_file(folder: Path) -> Path:
    """The file that a run locks while it saves."""
    return folder / _LOCK


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a finished checkpoint."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the checkpoint in a folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = "no finished checkpoint" if isinstance(error, FileNotFoundError) else str(error)
        remedy = "Load an earlier checkpoint, or start from the model's weights alone"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, f"hold {MANIFEST}", remedy)) from None
    return from_text(text, str(path))


def write_part(folder: Path, part: Manifest, rank: int) -> None:
    """Writes a rank's own manifest, for the rank that commits."""
    with disk.written(_part_file(folder, part.save_id, rank)) as file:
        disk.write(file, to_text(part).encode())


def read_part(folder: Path, save_id: str, rank: int) -> Manifest | None:
    """Reads a rank's own manifest; None while it is not there or not complete."""
    with suppress(OSError, UnicodeDecodeError, CheckpointError):
        path = _part_file(folder, save_id, rank)
        return from_text(path.read_text(encoding="utf-8"), str(path))
    return None


def write_failure(folder: Path, save_id: str, rank: int, text: str) -> None:
    """Tells the rank that commits that no part of this rank will come."""
    with disk.written(_failure_file(folder, save_id, rank)) as file:
        disk.write(file, text.encode())


def read_failure(folder: Path, save_id: str, rank: int) -> str | None:
    """Why no part of a rank will come; None where the rank did not say so."""
    path = _failure_file(folder, save_id, rank)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _failure_file(folder: Path, save_id: str, rank: int) -> Path:
    return folder / f"{save_id}-{rank:05d}{_FAILED}"


def commit(folder: Path, parts: Sequence[Manifest]) -> Manifest:
    """Makes a checkpoint of the files that the ranks wrote, see [Note: commit].

    Args:
        folder: of the checkpoint.
        parts: of all ranks, in order.

    Raises:
        CheckpointError: params or elements are missing or written twice, or a file is not as its rank wrote it.
        OSError: the disk fails; the folder holds the old checkpoint or the new one.
    """
    manifest = join(parts)
    check_written(manifest)
    for key, record in manifest.tensors.items():
        _check_complete(key, record)
    for each in manifest.files:
        _check_there(folder, each)
    metadata = metadata_of(manifest)
    manifest = replace(manifest, metadata=(len(metadata), zlib.crc32(metadata)))
    contents = {MANIFEST: to_text(manifest).encode(), _METADATA: metadata}
    for name, content in contents.items():
        with disk.written(_new_file(folder, manifest.save_id, name)) as file:
            disk.write(file, content)
    disk.sync_folder(folder)
    for name in contents:
        disk.replace(_new_file(folder, manifest.save_id, name), folder / name)
    disk.sync_folder(folder)
    _remove_except({file.name for file in manifest.files}, folder)
    return manifest


def withdraw(folder: Path, save_id: str) -> None:
    """Removes the files of a save that failed, except those that the manifest names, see [Note: commit]."""
    with suppress(OSError, CheckpointError):  # it is unknown which files a damaged manifest names: all stay
        named = {file.name for file in read_manifest(folder).files} if is_checkpoint(folder) else set()
        for path in folder.glob(f"{save_id}-*"):
            if path.name not in named:
                disk.remove(path)


def saves_in(folder: Path) -> set[str]:
    """Ids of the saves whose tensors lie in a folder: the checkpoint's, and those of saves that never ended."""
    return {path.name.partition("-")[0] for path in folder.glob(f"*{_DATA}") if _OF_A_SAVE.fullmatch(path.name)}


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. Other files in its folder stay, and so does the folder then.

    The manifest is removed first: a power cut must not leave one without files.

    Raises:
        OSError: the disk fails.
    """
    disk.remove(folder / MANIFEST)
    disk.sync_folder(folder)
    _remove_except(set(), folder)
    for name in (_METADATA, _LOCK):
        disk.remove(folder / name)
    with suppress(OSError):  # other files lie there
        folder.rmdir()


def _remove_except(kept: set[str], folder: Path) -> None:
    """Removes files of the checkpoint before, and of saves that never ended."""
    for path in folder.iterdir():
        if _OF_A_SAVE.fullmatch(path.name) and path.name not in kept:
            with suppress(OSError):  # a file that stays does no harm
                disk.remove(path)


def _check_complete(key: str, record: TensorRecord) -> None:
    numel = sum(chunk.box.numel for chunk in record.chunks)
    wanted, twice = math.prod(record.shape), overlap([chunk.box for chunk in record.chunks])
    if numel != wanted or twice is not None:
        got = f"{numel} elements written" if numel != wanted else "elements written twice, others not at all"
        rule = f"be written once, all {wanted} elements"
        remedy = "Give each param of the model a name of its own, and one rank that writes it"
        raise CheckpointError(refusal(f"tensor {key!r}", got, rule, remedy))


def _check_there(folder: Path, file: FileRecord) -> None:
    """The folder may have been removed, or another run saves there on a file system without locks."""
    path = folder / file.name
    try:
        with path.open("rb") as opened:  # a network file system may show an old size of a file that is not open
            got = f"{os.fstat(opened.fileno()).st_size} bytes"
    except FileNotFoundError:
        got = "not there"
    if got != f"{file.nbytes} bytes":
        rule, remedy = f"have the {file.nbytes} bytes that its rank wrote", "Let nothing else write or remove there"
        raise CheckpointError(refusal(f"file {path}", got, rule, remedy))
