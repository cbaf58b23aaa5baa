"""Files of plain torch: distributed checkpoints (DCP), and one file of `torch.save`.

A distributed checkpoint is a folder of `.distcp` files and `.metadata`, which says where everything
is. The metadata is a pickle and is read by `pickles.load_metadata`; tensors are read by
`torch.load(weights_only=True)`. The one file is for scripts of the user, and holds plain
containers:

::

    {"format": "megatron_distopt.torch", "version": 1,
     "tensors": {"main/NAME": fp32, "exp_avg/NAME": fp32, ...},           whole params
     "groups": [{"names": [...], "options": {...}, "step": 10, "scalars": {}}],
     "inner": "adam", "loss_scale": {...}, "num_skipped": 0, "about": {...}}
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.manifest import Chunk, TensorRecord
from megatron_distopt.checkpoint.manifest_text import head_from_json, head_to_json
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import DAMAGED, Source, read_chunks
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.pickles import (
    attribute,
    load_file,
    load_metadata,
    save_whole,
    understood,
)
from megatron_distopt.layout import Box

METADATA = ".metadata"
_FORMAT, _VERSION = "megatron_distopt.torch", 1


@dataclass(frozen=True)
class DcpFolder:
    """A distributed checkpoint."""

    folder: Path
    files: tuple[str, ...]  # their names
    tensors: Mapping[str, TensorRecord]  # by key, in the order in which they were saved
    objects: Mapping[str, Chunk]  # everything else, by key; their boxes have no meaning

    def read_box(self, key: str, box: Box) -> Tensor:
        """A part of a tensor; what lies elsewhere is not read."""
        return read_chunks(self.folder, self.files, key, self.tensors[key], box)

    def read_object(self, key: str) -> Any:
        """An object that is not a tensor."""
        stored = self.objects[key]
        path = self.folder / self.files[stored.file]
        with disk.refused(f"read file {path}", DAMAGED), open(path, "rb") as file:
            file.seek(stored.start)
            data = io.BytesIO(file.read(stored.nbytes))
        return load_file(data, f"Object {key!r} in {path}")


def open_dcp(folder: Path) -> DcpFolder:
    metadata = load_metadata(folder / METADATA)
    with understood(folder / METADATA, "say where every tensor is", DAMAGED):
        files: dict[str, int] = {}
        stored = dict(_stored_in(attribute(metadata, "storage_data"), files))
        kept = attribute(metadata, "state_dict_metadata")
        sizes = {key: attribute(entry, "size") for key, entry in kept.items()}
        tensors = {
            key: _tensor_of(key, kept[key], stored)
            for key, size in sizes.items()
            if size is not None
        }
        objects = {
            key: Chunk(Box.whole(()), *stored[key, None])
            for key, size in sizes.items()
            if size is None
        }
    return DcpFolder(folder, tuple(files), tensors, objects)


# of a tensor and the offset of a chunk, or of an object
_Key = tuple[str, "tuple[int, ...] | None"]
_Bytes = tuple[int, int, int]  # number of a file, first byte in it, bytes


def _stored_in(storage: Mapping[Any, Any], files: dict[str, int]) -> Iterator[tuple[_Key, _Bytes]]:
    """Where everything is; numbers the files."""
    for index, info in storage.items():
        name, offset = str(attribute(index, "fqn")), attribute(index, "offset")
        if attribute(info, "transform_descriptors"):
            raise CheckpointError(
                f"Tensor {name!r} of a torch checkpoint was transformed in a way that this "
                "package cannot undo. Save it without extensions of torch's FileSystemWriter, "
                "which compress it."
            )
        file = str(attribute(info, "relative_path"))
        # a path could lead out of the folder
        if file in ("", ".", "..") or "/" in file or "\\" in file:
            raise ValueError(f"{file!r} is not a file name")
        key = (name, None if offset is None else tuple(map(int, offset)))
        number = files.setdefault(file, len(files))
        yield key, (number, int(attribute(info, "offset")), int(attribute(info, "length")))


def _tensor_of(key: str, entry: Any, stored: Mapping[_Key, _Bytes]) -> TensorRecord:
    shape, properties = tuple(map(int, attribute(entry, "size"))), attribute(entry, "properties")
    # torch 2.3 and later save the dtype as the first of the properties, others by name.
    state: Sequence[Any] = attribute(properties, "state") or ()
    dtype = attribute(properties, "dtype") or next(iter(state), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    places = [
        (tuple(attribute(each, "offsets")), tuple(attribute(each, "sizes")))
        for each in attribute(entry, "chunks")
    ]
    chunks = tuple(
        Chunk(Box(offsets, sizes), *stored[key, offsets])
        for offsets, sizes in places
        if 0 not in sizes
    )
    numel = sum(chunk.box.numel for chunk in chunks)
    is_inside = 0 in shape or all(
        Box.whole(shape).intersect(chunk.box) == chunk.box for chunk in chunks
    )
    if numel != math.prod(shape) or not is_inside:
        raise ValueError(f"{key} has {numel} elements of {list(shape)}")
    return TensorRecord(shape, dtype_name(dtype), chunks)


def open_torch_file(path: Path) -> Source:
    """The state in a file that `write_torch_file` wrote."""
    state = load_file(path)
    found = state.get("format") if isinstance(state, Mapping) else None
    if found != _FORMAT or state.get("version") != _VERSION:
        raise CheckpointError(
            f"File {path} has format {found!r}, and must have {_FORMAT!r} of version {_VERSION}, "
            "which 'convert --to torch' writes. For a Megatron's file, give its iteration folder."
        )
    with understood(path, "hold what 'convert --to torch' writes", "Convert it again"):
        tensors = {str(key): value for key, value in state["tensors"].items()}
        strange = next(
            (key for key, value in tensors.items() if not isinstance(value, Tensor)), None
        )
        if strange is not None:
            raise TypeError(f"{strange} is not a tensor")
        head = head_from_json(state)
    check_groups((*head.groups, *head.untrained), f"file {path}")
    infos = {
        key: TensorRecord(tuple(tensor.shape), dtype_name(tensor.dtype))
        for key, tensor in tensors.items()
    }
    return Source(head, infos, lambda key, box: tensors[key][box.as_slices()].clone())


def write_torch_file(
    path: Path, source: Source, progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Writes all tensors into one file; they are in memory together."""
    tensors = {}
    for key in source.tensors:
        tensors[key] = source.read(key).contiguous()
        progress(tensors[key].numel() * tensors[key].element_size())
    save_whole(
        {"format": _FORMAT, "version": _VERSION, "tensors": tensors, **head_to_json(source.head)},
        path,
    )
