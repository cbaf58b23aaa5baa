"""The manifest as one JSON document, which docs/checkpoint.md specifies.

Nothing in it is trusted: it is checked while it is read.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_distopt.checkpoint.boxes import overlap
from megatron_distopt.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord
from megatron_distopt.checkpoint.param_groups import GroupRecord, Scalar, check_groups
from megatron_distopt.errors import CheckpointError, DistOptError
from megatron_distopt.layout import Box

_FORMAT_VERSION = 1
_FORMAT = "megatron_distopt"
#: File names; a path would let a manifest name files elsewhere.
_FILE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*")


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
        "groups": [_group_to_json(group) for group in manifest.groups],
        "resting": [_group_to_json(group) for group in manifest.untrained],
    }


def head_from_json(body: Mapping[str, Any]) -> Manifest:
    """The inverse of `head_to_json`; `check_groups` checks the values of the groups."""
    groups, untrained = (
        tuple(map(_group_from_json, body.get(key, ()))) for key in ("groups", "resting")
    )
    scale = {str(key): float(value) for key, value in body["loss_scale"].items()}
    skipped, about = int(body["num_skipped"]), dict(body["about"])
    return Manifest(
        "", (), {}, groups, str(body["inner"]), scale, skipped, about, untrained=untrained
    )


def _group_to_json(group: GroupRecord) -> dict[str, Any]:
    return {
        "names": list(group.names),
        "options": dict(group.options),
        "step": group.step,
        "scalars": {key: [scalar.value, scalar.dtype] for key, scalar in group.scalars.items()},
        **({"unsaved": dict(group.unsaved)} if group.unsaved else {}),
        **({"given": dict(group.given)} if group.given else {}),
    }


def _group_from_json(group: Mapping[str, Any]) -> GroupRecord:
    """The inverse of `_group_to_json`; `check_groups` checks the values."""
    scalars = {
        str(key): Scalar(value, dtype and _known_dtype(dtype))
        for key, (value, dtype) in group["scalars"].items()
    }
    return GroupRecord(
        names=tuple(map(str, group["names"])),
        options=dict(group["options"]),
        step=group["step"],
        scalars=scalars,
        unsaved=dict(group.get("unsaved", {})),
        given=dict(group.get("given", {})),
    )


def _known_dtype(name: str) -> str:
    """Returns the name of a dtype; a ValueError where torch has no such dtype."""
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return name


def _crc(body: object) -> int:
    """CRC-32 of the body as JSON without spaces and with sorted keys."""
    return zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())


def from_text(text: str, where: str) -> Manifest:
    """The inverse of `to_text`; `where` is the path of the file, for errors."""
    manifest, what = _parsed(text, where), f"manifest {where}"
    check_groups((*manifest.groups, *manifest.untrained), what)
    check_counts(manifest.loss_scale, manifest.num_skipped, what)
    return manifest


def _parsed(text: str, where: str) -> Manifest:
    what = f"Manifest {where}"
    damaged = "Load an earlier checkpoint; this one was damaged after it was written."
    try:
        document = json.loads(text)
        format, version, body = document["format"], document["version"], document["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be read as one JSON document: {error!r}. {damaged}"
        ) from None
    if format != _FORMAT or not isinstance(version, int) or not 1 <= version <= _FORMAT_VERSION:
        raise CheckpointError(
            f"{what} has format {format!r} of version {version!r}, and this package reads "
            f"{_FORMAT!r} of version 1 to {_FORMAT_VERSION}. Load it with the version of "
            "megatron-distopt that wrote it."
        )
    if document.get("crc32") != _crc(body):
        said = document.get("crc32")
        raise CheckpointError(
            f"{what} has CRC-32 {_crc(body)}, and must have the {said} that it says. {damaged}"
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
            f"{what} does not follow docs/checkpoint.md: {error!r}. {damaged}"
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
                f"{key} in {what} is {value!r}, and must {rule}. Load another checkpoint."
            )


def _from_json(body: Mapping[str, Any]) -> Manifest:
    files = tuple(
        FileRecord(str(name), int(nbytes), int(crc)) for name, nbytes, crc in body["files"]
    )
    for file in files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is not a file name")
    tensors = {
        str(key): TensorRecord(
            tuple(map(int, shape)),
            _known_dtype(dtype),
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
            raise ValueError(f"{key} lies outside {file.name}")
        if whole.intersect(chunk.box) != chunk.box:
            raise ValueError(f"{chunk.box} of {key} lies outside its shape {list(record.shape)}")
    if twice := overlap([chunk.box for chunk in record.chunks]):
        raise ValueError(f"{twice[0]} and {twice[1]} of {key} overlap")
