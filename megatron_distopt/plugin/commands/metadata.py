"""Whether torch's own reader would find what the manifest says: `.metadata` is compared, and no pickle is executed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.dcp import metadata_of
from megatron_distopt.checkpoint.exchange.dcp_reader import METADATA, DcpTensor, open_dcp
from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box
from megatron_distopt.plugin.commands.checks import Problem

__all__ = ["AREA", "check_metadata"]

AREA = "metadata"
#: A box, and the file, first byte and number of bytes that hold it.
_Place = tuple[Box, str, int, int]


@dataclass(frozen=True)
class _Held:
    """What one of the two says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    places: frozenset[_Place]


def check_metadata(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """At most one problem: torch alone cannot read the checkpoint, or would read something else.

    Args:
        folder: of the checkpoint.
        manifest: of it.
    """
    fault = _fault(folder, manifest)
    if fault:
        yield Problem(AREA, METADATA, f"{fault}: torch alone cannot rely on it, loading by megatron-distopt needs none")


def _fault(folder: Path, manifest: Manifest) -> str:
    try:
        content = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if manifest.metadata is not None:
        return _difference(content, *manifest.metadata)
    if content == metadata_of(manifest):
        return ""
    # The manifest is older than its checksum of this file. Another torch writes the same in other bytes.
    is_same_torch = manifest.about.get("torch") == torch.__version__
    return "is not what the manifest implies" if is_same_torch else _difference_in_content(folder, manifest)


def _difference(content: bytes, nbytes: int, crc32: int) -> str:
    if len(content) != nbytes:
        return f"has {len(content):,} bytes, not {nbytes:,}"
    found = zlib.crc32(content)
    return "" if found == crc32 else f"has CRC-32 {found:08x}, not {crc32:08x}"


def _difference_in_content(folder: Path, manifest: Manifest) -> str:
    """Of every tensor: shape, dtype, and of every box its file and bytes."""
    try:
        found = open_dcp(folder).tensors
    except CheckpointError as error:
        return f"cannot be used: {error}"
    there = {key: _Held(each.shape, dtype_name(each.dtype), _stored(each)) for key, each in found.items()}
    wanted = {key: _Held(each.shape, each.dtype, _listed(each, manifest)) for key, each in manifest.tensors.items()}
    differing = [key for key in {**wanted, **there} if there.get(key) != wanted.get(key)]
    return f"says something else of {differing[0]} than the manifest" if differing else ""


def _stored(tensor: DcpTensor) -> frozenset[_Place]:
    return frozenset((chunk.box, chunk.stored.file, chunk.stored.start, chunk.stored.nbytes) for chunk in tensor.chunks)


def _listed(record: TensorRecord, manifest: Manifest) -> frozenset[_Place]:
    return frozenset((chunk.box, manifest.files[chunk.file].name, chunk.start, chunk.nbytes) for chunk in record.chunks)
