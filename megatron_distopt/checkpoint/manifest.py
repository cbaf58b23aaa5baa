"""The manifest: what a checkpoint holds and where, as one JSON document. docs/checkpoint.md
specifies it.

Every rank makes one of its own file (a `Manifest` with one entry in `files`); joined, they are the
checkpoint's. Nothing in a manifest is trusted: it is checked while it is read, and no pickle is
read. `metadata_of` writes one, for torch's own reader.
"""

from __future__ import annotations

import gc
import json
import math
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import combinations
from typing import Any

import torch

from megatron_distopt.checkpoint.param_groups import (
    GroupRecord,
    check_groups,
    check_names_once,
    group_from_json,
    group_to_json,
    join_groups,
    known_dtype,
)
from megatron_distopt.errors import CheckpointError, DistOptError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE

_FORMAT_VERSION = 1
_FORMAT = "megatron_distopt"
#: File names; a path would let a manifest name files elsewhere.
_FILE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*")
#: The kind of the fp32 param itself; the other kinds are the inner optimizer's own names, such as
#: "exp_avg".
MAIN = "main"


def key_of(kind: str, name: str) -> str:
    """The key of a tensor in a checkpoint.

    >>> key_of("exp_avg", "decoder.final_layernorm.weight")
    'exp_avg/decoder.final_layernorm.weight'
    """
    return f"{kind}/{name}"


def kind_of(key: str) -> str:
    """The kind of a key: "main", or the inner optimizer's name for a moment."""
    return key.partition("/")[0]


def some_of(names: Sequence[str]) -> str:
    """The first three of them, for a text.

    >>> some_of(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def name_of(key: str) -> str:
    return key.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor, and the bytes that hold it, as `torch.save` wrote them."""

    box: Box  # of the whole tensor
    file: int  # number in `Manifest.files`
    start: int  # first byte in that file
    nbytes: int


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the whole model."""

    shape: tuple[int, ...]
    dtype: str  # e.g. "float32"
    # disjoint; together they are the whole tensor; none where a `Source` reads it
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class FileRecord:
    """One file: its name beside the manifest, size, and the CRC-32 of all its bytes."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    save_id: str  # in the names of the save's files
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]  # by `key_of`
    groups: tuple[GroupRecord, ...]
    inner: str  # name of the inner optimizer
    loss_scale: Mapping[str, float] = field(default_factory=dict)  # empty where it never changes
    num_skipped: int = 0  # steps that were skipped so far
    # host, sizes and versions of the run, for people
    about: Mapping[str, str | int] = field(default_factory=dict)
    # bytes and CRC-32 of `.metadata`; None in old checkpoints
    metadata: tuple[int, int] | None = None
    # of params that never trained; their options count once they are unfrozen
    resting: tuple[GroupRecord, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the params, in the order of the keys."""
        return tuple(name_of(key) for key in self.tensors if kind_of(key) == MAIN)

    @cached_property
    def has_averages(self) -> bool:
        return bool(self.names) and all(
            key_of(AVERAGE, name) in self.tensors for name in self.names
        )

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def join(parts: Sequence[Manifest]) -> Manifest:
    """Joins the manifests of the ranks, in their order, into that of the checkpoint.

    What is said once, such as the loss scale, is taken from the first. Checks what no rank can see
    alone: every param of a group was written, and every param is in one group.
    """
    chunks: dict[str, list[Chunk]] = {}
    records: dict[str, TensorRecord] = {}
    files: list[FileRecord] = []
    for part in parts:
        for key, record in part.tensors.items():
            known = records.setdefault(key, record)
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                one, other = (f"{each.dtype} {list(each.shape)}" for each in (record, known))
                raise CheckpointError(
                    f"Invalid tensor {key!r}: {one} on one rank and {other} on another. Must be "
                    "the same on all ranks. Report this."
                )
            moved = (replace(chunk, file=chunk.file + len(files)) for chunk in record.chunks)
            chunks.setdefault(key, []).extend(moved)
        files += part.files
    groups = join_groups(group for part in parts for group in part.groups)
    resting = join_groups(group for part in parts for group in part.resting)
    tensors = {key: replace(records[key], chunks=tuple(chunks[key])) for key in sorted(records)}
    for name in (name for group in groups for name in group.names):
        if key_of(MAIN, name) not in tensors:
            raise CheckpointError(
                f"Invalid param {name!r}: written by no rank. Must be written by one of the ranks "
                "that hold it. Report this."
            )
    check_names_once((*groups, *resting), "the checkpoint that is being saved")
    return replace(parts[0], files=tuple(files), tensors=tensors, groups=groups, resting=resting)


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a CRC-32 of its body."""
    body = {
        "save_id": manifest.save_id,
        "metadata": manifest.metadata,
        **head_to_json(manifest),
        "files": [[file.name, file.nbytes, file.crc32] for file in manifest.files],
        "tensors": {
            key: [
                list(record.shape),
                record.dtype,
                [
                    [list(c.box.offsets), list(c.box.sizes), c.file, c.start, c.nbytes]
                    for c in record.chunks
                ],
            ]
            for key, record in manifest.tensors.items()
        },
    }
    head = {"format": _FORMAT, "version": _FORMAT_VERSION, "crc32": _crc(body)}
    return json.dumps({**head, "body": body}, separators=(",", ":")) + "\n"


def head_to_json(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says beside files and tensors; also in the one file of plain torch
    (formats/torch_files.py)."""
    return {
        "about": dict(manifest.about),
        "inner": manifest.inner,
        "loss_scale": dict(manifest.loss_scale),
        "num_skipped": manifest.num_skipped,
        "groups": [group_to_json(group) for group in manifest.groups],
        "resting": [group_to_json(group) for group in manifest.resting],
    }


def head_from_json(body: Mapping[str, Any]) -> Manifest:
    """The inverse of `head_to_json`; `check_groups` checks the values of the groups."""
    groups, resting = (
        tuple(map(group_from_json, body.get(key, ()))) for key in ("groups", "resting")
    )
    scale = {str(key): float(value) for key, value in body["loss_scale"].items()}
    skipped, about = int(body["num_skipped"]), dict(body["about"])
    return Manifest("", (), {}, groups, str(body["inner"]), scale, skipped, about, resting=resting)


def _crc(body: object) -> int:
    """CRC-32 of the body as JSON without spaces and with sorted keys."""
    return zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())


def from_text(text: str, where: str) -> Manifest:
    """The inverse of `to_text`; `where` is the path of the file, for errors."""
    manifest, what = parsed(text, where), f"manifest {where}"
    check_groups((*manifest.groups, *manifest.resting), what)
    check_counts(manifest.loss_scale, manifest.num_skipped, what)
    return manifest


def parsed(text: str, where: str) -> Manifest:
    """`from_text` without a check of the values in param groups, for one that this save has written
    and checked."""
    what, damaged = (
        f"Invalid manifest {where}",
        "Load an earlier checkpoint; this one was damaged after it was written.",
    )
    try:
        document = json.loads(text)
        format, version, body = document["format"], document["version"], document["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: {error!r} while reading it. Must be one JSON document. {damaged}"
        ) from None
    if format != _FORMAT or not isinstance(version, int) or not 1 <= version <= _FORMAT_VERSION:
        raise CheckpointError(
            f"{what}: format {format!r} of version {version!r}. Must be {_FORMAT!r} of version 1 "
            f"to {_FORMAT_VERSION}. Load it with the version of megatron-distopt that wrote it."
        )
    if document.get("crc32") != _crc(body):
        said = document.get("crc32")
        raise CheckpointError(
            f"{what}: CRC-32 {_crc(body)}. Must have the {said} that it says. {damaged}"
        )
    try:
        return _from_json(body)
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        ArithmeticError,
        DistOptError,
    ) as error:
        raise CheckpointError(
            f"{what}: {error!r} while reading it. Must follow docs/checkpoint.md. {damaged}"
        ) from None


def check_counts(loss_scale: Mapping[str, Any], num_skipped: object, what: str) -> None:
    """Checks the loss scale and the count of skipped steps. Megatron's count of tolerated overflows
    may be negative."""
    for key, value in {**loss_scale, "num_skipped": num_skipped}.items():
        is_right = (
            isinstance(value, (int, float))
            and math.isfinite(value)
            and (key != "scale" or value > 0)
            and (key != "num_skipped" or value >= 0)
        )
        if not is_right:
            rule = {"scale": "be finite and above 0", "num_skipped": "be at least 0"}.get(
                key, "be finite"
            )
            raise CheckpointError(
                f"Invalid {key} in {what}: {value!r}. Must {rule}. Load another checkpoint."
            )


def _from_json(body: Mapping[str, Any]) -> Manifest:
    files = tuple(
        FileRecord(str(name), int(nbytes), int(crc)) for name, nbytes, crc in body["files"]
    )
    for file in files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is no file name")
    tensors = {
        str(key): TensorRecord(
            tuple(map(int, shape)),
            known_dtype(dtype),
            tuple(
                Chunk(
                    Box(tuple(map(int, offsets)), tuple(map(int, sizes))),
                    int(file),
                    int(start),
                    int(nbytes),
                )
                for offsets, sizes, file, start, nbytes in chunks
            ),
        )
        for key, (shape, dtype, chunks) in body["tensors"].items()
    }
    for key, record in tensors.items():
        _check_chunks(key, record, files)
    metadata = body.get("metadata")
    return replace(
        head_from_json(body),
        save_id=str(body["save_id"]),
        files=files,
        tensors=tensors,
        metadata=None if metadata is None else (int(metadata[0]), int(metadata[1])),
    )


def _check_chunks(key: str, record: TensorRecord, files: Sequence[FileRecord]) -> None:
    whole = Box.whole(record.shape)
    for chunk in record.chunks:
        file = files[chunk.file]
        if chunk.file < 0 or chunk.start < 0 or chunk.start + chunk.nbytes > file.nbytes:
            raise ValueError(f"{key} lies outside of {file.name}")
        if whole.intersect(chunk.box) != chunk.box:
            raise ValueError(f"{chunk.box} of {key} lies outside of its shape {list(record.shape)}")
    if twice := overlap([chunk.box for chunk in record.chunks]):
        raise ValueError(f"{twice[0]} and {twice[1]} of {key} overlap")


def metadata_of(manifest: Manifest) -> bytes:
    """The content of `.metadata`, for torch's own reader.

    torch's modules take seconds to import, so only a save imports them.
    """
    dcp = import_module("torch.distributed.checkpoint.metadata")
    place = import_module("torch.distributed.checkpoint.filesystem")._StorageInfo
    meta = dcp.StorageMeta(save_id=manifest.save_id)
    tensors, storage = {}, {}
    for key, record in manifest.tensors.items():
        chunks = []
        for chunk in record.chunks:
            offsets = torch.Size(chunk.box.offsets)
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(chunk.box.sizes)))
            file = manifest.files[chunk.file].name
            storage[dcp.MetadataIndex(key, offsets)] = place(file, chunk.start, chunk.nbytes)
        properties = dcp.TensorProperties(dtype=getattr(torch, record.dtype))
        tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
    return pickle.dumps(
        dcp.Metadata(tensors, planner_data={}, storage_data=storage, storage_meta=meta)
    )


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Finds two boxes that share elements; None where there are none.

    Boxes of a thousand ranks are separated dimension by dimension first, which leaves few to
    compare.

    >>> overlap([Box((0,), (4,)), Box((4,), (2,)), Box((3,), (1,))])
    (Box(offsets=(0,), sizes=(4,)), Box(offsets=(3,), sizes=(1,)))
    """
    for dim in range(len(boxes[0].offsets)) if boxes else ():
        parts: list[list[Box]] = []
        end = 0
        for box in sorted(boxes, key=lambda box: box.offsets[dim]):
            if box.offsets[dim] >= end:  # shares nothing with the boxes before it
                parts.append([])
            parts[-1].append(box)
            end = max(end, box.offsets[dim] + box.sizes[dim])
        if len(parts) > 1:
            return next((pair for part in parts if (pair := overlap(part))), None)
    return next(
        ((one, other) for one, other in combinations(boxes, 2) if one.intersect(other)), None
    )


def covering(
    wanted: Box, boxes: Sequence[Box], what: str, remedy: str
) -> Iterator[tuple[int, Box]]:
    """Yields which of the disjoint boxes hold elements of a box, by number, and which elements.

    Raises after the last box, where elements of the tensor, which the error calls `what`, are
    missing.
    """
    numel = 0
    for number, box in enumerate(boxes):
        both = wanted.intersect(box)
        if both is not None:
            numel += both.numel
            yield number, both
    if numel != wanted.numel:
        raise CheckpointError(
            f"Invalid {what}: {numel} elements of {wanted}. Must hold all {wanted.numel}, each "
            f"once. {remedy}."
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches Python's garbage collector off for a block that makes many small objects, none of
    them in a cycle.

    Plans and manifests would trigger collections that visit all objects of the process. After the
    imports of a Megatron each takes a tenth of a second, for which all ranks wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
