"""A checkpoint's folder: where it lies, how a save becomes the checkpoint in it, and which older
ones are removed.

::

    manifest.json            names every other file; there is a checkpoint where this file is
    SAVE_ID-00000.distcp     the tensors of rank 0; one file a rank
    .metadata                the manifest for torch's own reader; this package never reads it
    saving.lock              locked by a run while it saves

[Note: commit] A save writes files under names of its own, in the folder of the checkpoint that it
will replace. Each is on the disk (fsync) before the manifest is written, as
SAVE_ID-manifest.json.new. `os.replace` of that is the moment in which the new checkpoint takes the
place of the old one. Only then are the old files removed. A crash at any time leaves the old
manifest with the old files or the new one with the new files, and the next save removes what
belongs to neither. A save that fails after that moment, because a rank died or the user interrupts
it, is committed all the same: `withdraw` leaves what the manifest names.
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
from megatron_distopt.checkpoint.boxes import overlap
from megatron_distopt.checkpoint.manifest import FileRecord, Manifest, join
from megatron_distopt.checkpoint.manifest_text import from_text, to_text
from megatron_distopt.checkpoint.torch_metadata import metadata_of
from megatron_distopt.errors import CheckpointError

MANIFEST = "manifest.json"
_METADATA, _LOCK = ".metadata", "saving.lock"
#: Names of files of a save. Other files in the folder are never touched.
_OF_A_SAVE = re.compile(r"[0-9a-f]{8}-.+\.(distcp|part|new|failed)")
_SUFFIX = ".distopt"
#: Folders that a Megatron makes for each tensor- and pipeline-parallel rank. All of them share one
#: checkpoint.
_OF_A_RANK = re.compile(r"mp_rank_\d+(_\d+)*")
_ITERATION = re.compile(r"iter_(\d+)")


def new_save_id() -> str:
    """An id that is different for every save; it is in the names of the save's files."""
    return secrets.token_hex(4)


def file_of(folder: Path, save_id: str, rank: int, suffix: str = "distcp") -> Path:
    """A file of one rank: its tensors, or for the rank that commits, its manifest ("part") or the
    reason why there is none ("failed")."""
    return folder / f"{save_id}-{rank:05d}.{suffix}"


def lock_file(folder: Path) -> Path:
    return folder / _LOCK


def is_checkpoint(folder: Path) -> bool:
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
        got = (
            f"it holds no finished checkpoint, because there is no {MANIFEST}"
            if isinstance(error, FileNotFoundError)
            else str(error)
        )
        raise CheckpointError(
            f"Checkpoint {folder} cannot be read: {got}. Load an earlier checkpoint, or start "
            "from the model's weights alone."
        ) from None
    return from_text(text, str(path))


def commit(folder: Path, parts: Sequence[Manifest]) -> Manifest:
    """Makes a checkpoint of the files that the ranks wrote, see [Note: commit]; parts are in the
    order of the ranks.

    After an OSError the folder holds the old checkpoint or the new one.
    """
    manifest = join(parts)
    check_complete(manifest)
    for file in manifest.files:
        _check_there(folder, file)
    metadata = metadata_of(manifest)
    manifest = replace(manifest, metadata=(len(metadata), zlib.crc32(metadata)))
    contents = {MANIFEST: to_text(manifest).encode(), _METADATA: metadata}
    new_files = {name: folder / f"{manifest.save_id}-{name}.new" for name in contents}
    for name, content in contents.items():
        disk.write_file(new_files[name], content)
    disk.sync_folder(folder)
    for name, new_file in new_files.items():
        disk.replace(new_file, folder / name)
    disk.sync_folder(folder)
    _remove_except({file.name for file in manifest.files}, folder)
    return manifest


def check_complete(manifest: Manifest) -> None:
    """Checks that the files of a manifest hold every element of its tensors once."""
    for key, record in manifest.tensors.items():
        numel, wanted = sum(chunk.box.numel for chunk in record.chunks), math.prod(record.shape)
        if numel != wanted or overlap([chunk.box for chunk in record.chunks]) is not None:
            got = (
                f"{numel} of its {wanted} elements were written"
                if numel != wanted
                else f"some of its {wanted} elements were written twice and others not at all"
            )
            raise CheckpointError(
                f"Tensor {key!r} is not complete: {got}. Give each param of the model a name of "
                "its own, and let one rank write it."
            )


def _check_there(folder: Path, file: FileRecord) -> None:
    """The folder may have been removed, or another run saves there on a file system without
    locks."""
    path = folder / file.name
    try:
        # a network file system may show an old size of a file that is not open
        with path.open("rb") as opened:
            got = f"has {os.fstat(opened.fileno()).st_size} bytes"
    except FileNotFoundError:
        got = "is not there"
    if got != f"has {file.nbytes} bytes":
        raise CheckpointError(
            f"File {path} {got}, and its rank wrote {file.nbytes} bytes. Let no other program "
            "write or remove files there."
        )


def withdraw(folder: Path, save_id: str) -> None:
    """Removes the files of a save that failed, except those that the manifest names, see [Note:
    commit]."""
    # it is unknown which files a damaged manifest names: all stay
    with suppress(OSError, CheckpointError):
        named = (
            {file.name for file in read_manifest(folder).files} if is_checkpoint(folder) else set()
        )
        for path in folder.glob(f"{save_id}-*"):
            if path.name not in named:
                disk.remove(path)


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. Other files in its folder stay, and so does the folder then.

    The manifest is removed first: a power cut must not leave one without files.
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


def optimizer_folder_of(filename: str) -> Path:
    """The folder of the checkpoint that belongs to a file of the host, the same for all ranks of
    the model.

    >>> optimizer_folder_of("run/iter_0000010/mp_rank_00_001/distrib_optim.pt").as_posix()
    'run/iter_0000010/distrib_optim.distopt'
    """
    path = Path(filename)
    parent = path.parent.parent if _OF_A_RANK.fullmatch(path.parent.name) else path.parent
    return parent / f"{path.stem}{_SUFFIX}"


def finished_iterations(folder: Path) -> list[Path]:
    """Finished checkpoints of the other iterations in a Megatron's folder of a run, the latest
    first."""
    if not _ITERATION.fullmatch(folder.parent.name):
        return []
    others = (iteration / folder.name for iteration in folder.parent.parent.glob("iter_*"))
    finished = (
        each
        for each in others
        if each != folder and _iteration_of(each) >= 0 and is_checkpoint(each)
    )
    return sorted(finished, key=_iteration_of, reverse=True)


def _iteration_of(folder: Path) -> int:
    match = _ITERATION.fullmatch(folder.parent.name)
    return int(match.group(1)) if match else -1


def not_found(folder: Path, filename: str) -> CheckpointError:
    """The error where there is neither a checkpoint of ours nor the host's file."""
    remedy = "Start from the weights with --no-load-optim"
    others = finished_iterations(folder)
    if others:
        latest = _iteration_of(others[0])
        remedy = (
            f"Write {latest} into latest_checkpointed_iteration.txt, because the save of "
            f"iteration {latest} ended and the save of this one never did"
        )
    return CheckpointError(
        f"There is no optimizer state: neither {folder / MANIFEST} nor {filename} exists. {remedy}."
    )
