"""The manifest: what a checkpoint holds and where, as one JSON document. docs/checkpoint.md specifies it.

Every rank makes one of its own file (a `Manifest` with one entry in `files`); joined, they are the checkpoint's.
Nothing in a manifest is trusted: it is checked while it is read, and no pickle is involved.
"""

from __future__ import annotations

import gc
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from megatron_distopt.checkpoint.param_groups import (
    GroupRecord,
    check_groups,
    group_from_json,
    group_to_json,
    join_groups,
    known_dtype,
)
from megatron_distopt.errors import CheckpointError, DistOptError, refusal
from megatron_distopt.layout import Box

_FORMAT_VERSION = 1
_FORMAT = "megatron_distopt"
#: File names; a path would let a manifest name files elsewhere.
_FILE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*")
#: The kind of the fp32 param itself; the other kinds are the inner optimizer's own names, such as "exp_avg".
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

    Examples:
        >>> some_of(["a", "b", "c", "d", "e"])
        "'a', 'b', 'c' and 2 more"
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def name_of(key: str) -> str:
    """The name of the param in a key."""
    return key.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor, and the bytes that hold it, as `torch.save` wrote them.

    Args:
        box: of the whole tensor.
        file: number in `Manifest.files`.
        start: first byte in that file.
        nbytes: number of bytes there.
    """

    box: Box
    file: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the whole model.

    Args:
        shape: of the whole param.
        dtype: e.g. "float32".
        chunks: disjoint; together they are the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileRecord:
    """One file: its name beside the manifest, size, and the CRC-32 of all its bytes."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        save_id: of the save, in the names of its files.
        files: all of them.
        tensors: by key, see `key_of`.
        groups: param groups.
        resting: param groups of params that never trained; their options count once they are unfrozen.
        inner: name of the inner optimizer.
        loss_scale: numbers of the loss scale; empty where it never changes.
        num_skipped: steps that were skipped so far.
        about: host, sizes of the parallel groups and versions of the run that wrote it, for people to read.
        earlier: ids of the saves before it, the latest last, see [Note: history] in whole_model.py.
        metadata: bytes and CRC-32 of the file `.metadata`; None before that is written, and in old checkpoints.
    """

    save_id: str
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    groups: tuple[GroupRecord, ...]
    inner: str
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    num_skipped: int = 0
    about: Mapping[str, str | int] = field(default_factory=dict)
    earlier: tuple[str, ...] = ()
    metadata: tuple[int, int] | None = None
    resting: tuple[GroupRecord, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the params, in the order of the keys."""
        return tuple(name_of(key) for key in self.tensors if kind_of(key) == MAIN)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(each.nbytes for each in self.files)


def join(parts: Sequence[Manifest]) -> Manifest:
    """Joins the manifests of all ranks into that of the checkpoint.

    Args:
        parts: by rank; what is said once for the checkpoint, such as the loss scale, is taken from the first.

    Raises:
        CheckpointError: ranks disagree about a tensor.
    """
    tensors: dict[str, TensorRecord] = {}
    files: list[FileRecord] = []
    for part in parts:
        for key, record in part.tensors.items():
            moved = tuple(replace(chunk, file=chunk.file + len(files)) for chunk in record.chunks)
            known = tensors.setdefault(key, TensorRecord(record.shape, record.dtype, ()))
            if (known.shape, known.dtype) != (record.shape, record.dtype):
                got = f"{_described(record)} on one rank and {_described(known)} on another"
                raise CheckpointError(refusal(f"tensor {key!r}", got, "be the same on all ranks", "Report this"))
            tensors[key] = replace(known, chunks=known.chunks + moved)
        files += part.files
    groups = join_groups([group for part in parts for group in part.groups])
    resting = join_groups([group for part in parts for group in part.resting])
    joined = dict(sorted(tensors.items()))
    return replace(parts[0], files=tuple(files), tensors=joined, groups=groups, resting=resting)


def check_written(manifest: Manifest) -> None:
    """Checks that the values of every param were written, and that the groups hold nothing that a load would refuse.

    Args:
        manifest: of the whole model.

    Raises:
        CheckpointError
    """
    missing = [name for group in manifest.groups for name in group.names if key_of(MAIN, name) not in manifest.tensors]
    if missing:
        rule, remedy = "be written by one of the ranks that hold it", "Report this"
        raise CheckpointError(refusal(f"param {missing[0]!r}", "written by no rank", rule, remedy))
    check_groups((*manifest.groups, *manifest.resting), "the checkpoint that is being saved")


def _described(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a CRC-32 of its body."""
    body = {
        "save_id": manifest.save_id,
        "earlier": list(manifest.earlier),
        "metadata": manifest.metadata,
        "about": dict(manifest.about),
        "inner": manifest.inner,
        "loss_scale": dict(manifest.loss_scale),
        "num_skipped": manifest.num_skipped,
        "groups": [group_to_json(group) for group in manifest.groups],
        "resting": [group_to_json(group) for group in manifest.resting],
        "files": [[file.name, file.nbytes, file.crc32] for file in manifest.files],
        "tensors": {
            key: [list(record.shape), record.dtype, [_chunk_to_json(chunk) for chunk in record.chunks]]
            for key, record in manifest.tensors.items()
        },
    }
    head = {"format": _FORMAT, "version": _FORMAT_VERSION, "crc32": _crc(body)}
    return json.dumps({**head, "body": body}, separators=(",", ":")) + "\n"


def _chunk_to_json(chunk: Chunk) -> list[Any]:
    return [list(chunk.box.offsets), list(chunk.box.sizes), chunk.file, chunk.start, chunk.nbytes]


def _crc(body: object) -> int:
    """CRC-32 of the body as JSON without spaces and with sorted keys."""
    return zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())


def from_text(text: str, where: str) -> Manifest:
    """The inverse of `to_text`.

    Args:
        text: of the file.
        where: its path, for errors.

    Raises:
        CheckpointError: it is no manifest, damaged, of a later version, or has values that no optimizer can use.
    """
    what, remedy = f"manifest {where}", "Load an earlier checkpoint; this one was damaged after it was written"
    try:
        document = json.loads(text)
        found, version, body = document["format"], document["version"], document["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(refusal(what, f"{error!r} while reading it", "be one JSON document", remedy)) from None
    if found != _FORMAT or not isinstance(version, int) or not 1 <= version <= _FORMAT_VERSION:
        rule = f"be {_FORMAT!r} of version 1 to {_FORMAT_VERSION}"
        newer = "Load it with the version of megatron-distopt that wrote it"
        raise CheckpointError(refusal(what, f"format {found!r} of version {version!r}", rule, newer))
    if document.get("crc32") != _crc(body):
        got, rule = f"CRC-32 {_crc(body)}", f"have the {document.get('crc32')} that it says"
        raise CheckpointError(refusal(what, got, rule, remedy))
    try:
        manifest = _from_json(body)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, DistOptError) as error:
        raise CheckpointError(
            refusal(what, f"{error!r} while reading it", "follow docs/checkpoint.md", remedy)
        ) from None
    check_groups((*manifest.groups, *manifest.resting), what)
    check_counts(manifest, what)
    return manifest


def check_counts(manifest: Manifest, what: str) -> None:
    """Checks the loss scale and the count of skipped steps. Megatron's count of tolerated overflows may be negative.

    Args:
        manifest: was read, or is about to be written.
        what: what errors call it.

    Raises:
        CheckpointError
    """
    for key, value in {**manifest.loss_scale, "num_skipped": manifest.num_skipped}.items():
        is_right = math.isfinite(value) and (key != "scale" or value > 0) and (key != "num_skipped" or value >= 0)
        if not is_right:
            rule = {"scale": "be finite and above 0", "num_skipped": "be at least 0"}.get(key, "be finite")
            raise CheckpointError(refusal(f"{key} in {what}", repr(value), rule, "Load another checkpoint"))


def _from_json(body: Mapping[str, Any]) -> Manifest:
    manifest = Manifest(
        save_id=str(body["save_id"]),
        files=tuple(FileRecord(_plain_name(name), int(nbytes), int(crc)) for name, nbytes, crc in body["files"]),
        tensors={
            str(key): TensorRecord(tuple(map(int, shape)), known_dtype(dtype), tuple(map(_chunk_from_json, chunks)))
            for key, (shape, dtype, chunks) in body["tensors"].items()
        },
        groups=tuple(map(group_from_json, body["groups"])),
        inner=str(body["inner"]),
        loss_scale={str(key): float(value) for key, value in body["loss_scale"].items()},
        num_skipped=int(body["num_skipped"]),
        about=dict(body["about"]),
        earlier=tuple(map(str, body.get("earlier", ()))),
        metadata=_metadata_from_json(body.get("metadata")),
        resting=tuple(map(group_from_json, body.get("resting", ()))),
    )
    _check_chunks(manifest)
    return manifest


def _metadata_from_json(record: Sequence[Any] | None) -> tuple[int, int] | None:
    if record is None:
        return None
    nbytes, crc32 = map(int, record)
    return nbytes, crc32


def _plain_name(name: str) -> str:
    """The name of a file in the folder of the manifest."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file name")
    return name


def _chunk_from_json(record: Sequence[Any]) -> Chunk:
    offsets, sizes, file, start, nbytes = record
    return Chunk(Box(tuple(map(int, offsets)), tuple(map(int, sizes))), int(file), int(start), int(nbytes))


def _check_chunks(manifest: Manifest) -> None:
    for key, record in manifest.tensors.items():
        whole = Box.whole(record.shape)
        for chunk in record.chunks:
            file = manifest.files[chunk.file]
            if chunk.file < 0 or chunk.start < 0 or chunk.start + chunk.nbytes > file.nbytes:
                raise ValueError(f"{key} lies outside of {file.name}")
            if whole.intersect(chunk.box) != chunk.box:
                raise ValueError(f"{chunk.box} of {key} lies outside of its shape {list(record.shape)}")
        if twice := overlap([chunk.box for chunk in record.chunks]):
            raise ValueError(f"{twice[0]} and {twice[1]} of {key} overlap")


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Finds two boxes that share elements; None where there are none.

    Boxes of a thousand ranks are separated dimension by dimension first, which leaves few to compare.

    >>> overlap([Box((0,), (4,)), Box((4,), (2,)), Box((3,), (1,))])
    (Box(offsets=(0,), sizes=(4,)), Box(offsets=(3,), sizes=(1,)))
    """
    if len(boxes) < 2:
        return None
    for dim in range(len(boxes[0].offsets)):
        parts = _apart(boxes, dim)
        if len(parts) > 1:
            return next((found for part in parts if (found := overlap(part))), None)
    return next(((one, other) for one, other in combinations(boxes, 2) if one.intersect(other)), None)


def _apart(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Separates boxes into parts: those of different parts share nothing along a dimension."""
    parts: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda each: each.offsets[dim]):
        if box.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return parts


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches Python's garbage collector off for a block that makes many small objects, none of them in a cycle.

    Plans and manifests would trigger collections that visit all objects of the process. After the imports of a Megatron
    each takes a tenth of a second, for which all ranks wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
