"""A distributed checkpoint of torch (DCP): a folder of `.distcp` files and `.metadata`, which says where everything is.

`.metadata` is a pickle and is read by `pickles.load_metadata`; every tensor is read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import Chunk
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.pickles import attribute, load_bytes, load_metadata
from megatron_distopt.layout import Box

METADATA = ".metadata"
_REMEDY = "Load an earlier checkpoint; this one is damaged or incomplete"


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a file of the folder."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class DcpChunk:
    """One box of a tensor, and where it is."""

    box: Box
    stored: StoredBytes


@dataclass(frozen=True)
class DcpTensor:
    """A tensor as the metadata has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True)
class DcpFolder:
    """A distributed checkpoint."""

    folder: Path
    tensors: Mapping[str, DcpTensor]  # by key, in the order in which they were saved
    objects: Mapping[str, StoredBytes]  # everything else, by key

    def read_box(self, key: str, box: Box) -> Tensor:
        """A part of a tensor; what lies elsewhere is not read."""
        tensor = self.tensors[key]
        found, numel = torch.empty(box.sizes, dtype=tensor.dtype), 0
        for chunk in tensor.chunks:
            both = box.intersect(chunk.box)
            if both is not None:
                read = self._read_chunk(key, chunk, tensor.dtype)
                found[both.relative_to(box.offsets).as_slices()] = read[both.relative_to(chunk.box.offsets).as_slices()]
                numel += both.numel
        if numel != box.numel:
            got, rule = f"{numel} elements of {box}", f"hold all {box.numel}, each once"
            raise CheckpointError(refusal(f"tensor {key!r} in {self.folder}", got, rule, _REMEDY))
        return found

    def _read_chunk(self, key: str, chunk: DcpChunk, dtype: torch.dtype) -> Tensor:
        path, stored = self.folder / chunk.stored.file, chunk.stored
        try:
            with TensorReader(path) as reader:
                return reader.read(key, Chunk(chunk.box, 0, stored.start, stored.nbytes), dtype)
        except OSError as error:
            raise CheckpointError(refusal(f"file {path}", error, "be readable", _REMEDY)) from error

    def read_object(self, key: str) -> Any:
        """An object that is no tensor; see `pickles.load_bytes`."""
        stored = self.objects[key]
        path = self.folder / stored.file
        try:
            with open(path, "rb") as file:
                file.seek(stored.start)
                data = file.read(stored.nbytes)
        except OSError as error:
            raise CheckpointError(refusal(f"file {path}", error, "be readable", _REMEDY)) from error
        return load_bytes(data, f"object {key!r} in {path}")


def open_dcp(folder: Path) -> DcpFolder:
    """Reads the metadata."""
    metadata = load_metadata(folder / METADATA)
    try:
        stored = dict(_stored_in(attribute(metadata, "storage_data")))
        kept = attribute(metadata, "state_dict_metadata")
        sizes = {key: attribute(entry, "size") for key, entry in kept.items()}
        tensors = {key: _tensor_of(key, kept[key], stored) for key, size in sizes.items() if size is not None}
        objects = {key: stored[key, None] for key, size in sizes.items() if size is None}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        rule = "say of every tensor where it is"
        raise CheckpointError(refusal(f"file {folder / METADATA}", f"{error!r}", rule, _REMEDY)) from error
    return DcpFolder(folder, tensors, objects)


_Place = tuple[str, "tuple[int, ...] | None"]


def _stored_in(storage: Mapping[Any, Any]) -> Iterator[tuple[_Place, StoredBytes]]:
    for index, info in storage.items():
        name, offset = str(attribute(index, "fqn")), attribute(index, "offset")
        if attribute(info, "transform_descriptors"):
            raise ValueError(f"{name} is compressed, which no reader here undoes")
        place = (name, None if offset is None else tuple(map(int, offset)))
        file = _plain_name(str(attribute(info, "relative_path")))
        yield place, StoredBytes(file, int(attribute(info, "offset")), int(attribute(info, "length")))


def _plain_name(name: str) -> str:
    """The name of a file in the folder. A path could lead out of it, and is refused."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"{name!r} is no file name")
    return name


def _tensor_of(key: str, entry: Any, stored: Mapping[_Place, StoredBytes]) -> DcpTensor:
    shape, dtype = tuple(map(int, attribute(entry, "size"))), _dtype_of(attribute(entry, "properties"))
    places = [
        (tuple(attribute(each, "offsets")), tuple(attribute(each, "sizes"))) for each in attribute(entry, "chunks")
    ]
    chunks = tuple(DcpChunk(Box(offsets, sizes), stored[key, offsets]) for offsets, sizes in places if 0 not in sizes)
    numel = sum(chunk.box.numel for chunk in chunks)
    is_inside = 0 in shape or all(Box.whole(shape).intersect(chunk.box) == chunk.box for chunk in chunks)
    if numel != math.prod(shape) or not is_inside:
        raise ValueError(f"{key} has {numel} elements of {list(shape)}")
    return DcpTensor(shape, dtype, chunks)


def _dtype_of(properties: Any) -> torch.dtype:
    """torch 2.3 and later save it as the first of the properties, others by name."""
    dtype = attribute(properties, "dtype")
    state: Sequence[Any] = attribute(properties, "state") or ()
    found = dtype if dtype is not None else next(iter(state), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{found!r} is no dtype")
    return found
