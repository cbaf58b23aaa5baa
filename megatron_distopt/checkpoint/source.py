"""The optimizer state of a whole model, in whatever format it is kept; commands and converters read
it param by param.

A reader of a format returns a `Source`, and a writer takes one. One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.boxes import covering
from megatron_distopt.checkpoint.folder import (
    commit,
    file_of,
    lock_file,
    new_save_id,
    read_manifest,
    withdraw,
)
from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.tensor_file import TensorReader, TensorWriter
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box

DAMAGED = "Load an earlier checkpoint; this one was damaged after it was written"
#: A checkpoint that one process writes begins a new file where one has reached this size.
_FILE_NBYTES = 4 << 30


@dataclass(frozen=True)
class Source:
    """The optimizer state of a whole model."""

    head: Manifest  # param groups, loss scale and so on; without files and tensors
    # by key ("main/NAME", "exp_avg/NAME" ...), in the best order to read them
    tensors: Mapping[str, TensorRecord]
    #: Reads a part of the tensor of a key, on the CPU and with memory of its own; little else is
    #: read from the disk.
    read_box: Callable[[str, Box], Tensor]

    def read(self, key: str) -> Tensor:
        info = self.tensors[key]
        if 0 in info.shape:
            return torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        return self.read_box(key, Box.whole(info.shape))


def open_checkpoint(folder: Path) -> Source:
    manifest = read_manifest(folder)
    records = {key: replace(record, chunks=()) for key, record in manifest.tensors.items()}
    return Source(
        replace(manifest, files=(), tensors={}), records, partial(read_saved, folder, manifest)
    )


def read_saved(folder: Path, manifest: Manifest, key: str, box: Box) -> Tensor:
    """A part of a tensor of the checkpoint in a folder."""
    return read_chunks(
        folder, [file.name for file in manifest.files], key, manifest.tensors[key], box
    )


def read_chunks(
    folder: Path, files: Sequence[str], key: str, record: TensorRecord, box: Box
) -> Tensor:
    """A part of a tensor in some of the files of a folder; what lies elsewhere is not read."""
    dtype: torch.dtype = getattr(torch, record.dtype)
    values = torch.empty(box.sizes, dtype=dtype)
    what = f"Tensor {key!r} in {folder}"
    for number, both in covering(box, [chunk.box for chunk in record.chunks], what, DAMAGED):
        chunk = record.chunks[number]
        path = folder / files[chunk.file]
        with disk.refused(f"read file {path}", DAMAGED), TensorReader(path) as reader:
            part = reader.read(key, chunk, dtype)[both.relative_to(chunk.box.offsets).as_slices()]
            values[both.relative_to(box.offsets).as_slices()] = part
    return values


def write_checkpoint(
    folder: Path, source: Source, progress: Callable[[int], None] = lambda nbytes: None
) -> Manifest:
    """Writes a checkpoint from one process, and calls `progress` with the bytes of every tensor
    that is written.

    What the folder held before is replaced at the end.
    """
    check_groups((*source.head.groups, *source.head.untrained), "the optimizer state")
    save_id, lock = new_save_id(), None
    try:
        disk.make_folder(folder)
        lock = disk.lock(lock_file(folder))
        return commit(folder, list(_written_parts(folder, source, save_id, progress)))
    except BaseException as error:
        withdraw(folder, save_id)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"Checkpoint {folder} cannot be written: {error}. Free space there, or write "
                "elsewhere; what was there before is untouched."
            ) from error
        raise
    finally:
        disk.unlock(lock)


def _written_parts(
    folder: Path, source: Source, save_id: str, progress: Callable[[int], None]
) -> Iterator[Manifest]:
    """Writes files of about the same size, and yields the manifest of each."""
    keys, number = iter(source.tensors), 0
    key = next(keys, None)
    while key is not None or number == 0:
        path = file_of(folder, save_id, number)
        with disk.written(path) as file:
            writer, nbytes = TensorWriter(path, file), 0
            while key is not None and nbytes < _FILE_NBYTES:
                chunk = writer.append(key, source.read(key))
                nbytes += chunk.nbytes
                progress(chunk.nbytes)
                key = next(keys, None)
        yield writer.part(source.head, save_id)
        number += 1
