"""torch's distributed checkpoints (DCP): what its reader and its planner are told about our state.

`metadata_of` makes the `.metadata` of a checkpoint, with which torch alone can read it. A `ShardedValue` is a tensor of
which this rank holds boxes: DCP takes any tensor that says which boxes it has and gives the memory of each
(torch/distributed/_checkpointable.py). Any other use of such a value is refused: on one rank it is a part, and what was
computed from it would be wrong without an error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box

_REMEDY = (
    "Call optimizer.save(folder) or torch.distributed.checkpoint.save on all ranks, optimizer.full_state_dict() on all "
    "ranks for whole tensors on rank 0, or optimizer.local_state_dict() for this rank's part alone"
)
#: Operators that are applied to each box by itself: they move, copy or allocate.
_ON_EACH_BOX = ("aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::empty_like", "aten::zeros_like")


def metadata_of(manifest: Manifest) -> bytes:
    """The content of `.metadata`; empty where this torch has no distributed checkpoints.

    torch's modules take seconds to import, so only a save imports them.
    """
    try:
        torchs = import_module("torch.distributed.checkpoint.metadata")
        place = import_module("torch.distributed.checkpoint.filesystem")._StorageInfo
        meta = torchs.StorageMeta(save_id=manifest.save_id)
    except (ImportError, AttributeError):  # torch before 2.3 has no reader for it either
        return b""
    state = {key: _tensor_metadata_of(record, torchs) for key, record in manifest.tensors.items()}
    storage = {
        torchs.MetadataIndex(key, torch.Size(chunk.box.offsets)): place(
            manifest.files[chunk.file].name, chunk.start, chunk.nbytes
        )
        for key, record in manifest.tensors.items()
        for chunk in record.chunks
    }
    return pickle.dumps(torchs.Metadata(state, planner_data={}, storage_data=storage, storage_meta=meta))


def _tensor_metadata_of(record: TensorRecord, torchs: Any) -> Any:
    chunks = [
        torchs.ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
        for chunk in record.chunks
    ]
    properties = torchs.TensorProperties(dtype=getattr(torch, record.dtype))
    return torchs.TensorStorageMetadata(properties, torch.Size(record.shape), chunks)


class ShardedValue(Tensor):
    """One value of an optimizer's state: it has the shape of the whole param, and this rank has boxes of it.

    Args:
        shape: of the whole param.
        boxes: that this rank holds; disjoint, and none where it owns nothing of the param.
        parts: memory of each box, in its shape: views of the live state.
        dtype, device: of the value, also where this rank has no box.
        writes: whether this rank writes its boxes; False where another rank that holds the same does.
    """

    boxes: tuple[Box, ...]
    parts: list[Tensor]
    writes: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Sequence[Box],
        parts: Sequence[Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        writes: bool = True,
    ) -> ShardedValue:
        value: ShardedValue = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        value.boxes, value.parts, value.writes = tuple(boxes), list(parts), writes
        return value

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `__new__` has set everything."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        held = sum(box.numel for box in self.boxes)
        return f"ShardedValue(shape={list(self.shape)}, dtype={self.dtype}, {held} of {self.numel()} elements here)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub forgets that it is a class method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = func.name().partition(".")[0], kwargs or {}
        if name in _ON_EACH_BOX and isinstance(args[0], cls):
            return args[0]._mapped(lambda part: func(part, *args[1:], **given), **given)
        if name == "aten::new_empty" and isinstance(args[0], cls) and tuple(args[1]) == tuple(args[0].shape):
            return args[0]._mapped(lambda part: func(part, part.shape, **given), **given)
        if name == "aten::copy_" and _are_alike(args[0], args[1]):
            for into, part in zip(args[0].parts, args[1].parts, strict=True):
                into.copy_(part)
            return args[0]
        raise CheckpointError(
            refusal("sharded value of the optimizer's state", f"in {name}", "be saved and loaded by all ranks", _REMEDY)
        )

    def _mapped(self, change: Callable[[Tensor], Tensor], **given: Any) -> ShardedValue:
        """The same boxes with other memory."""
        dtype, device = given.get("dtype") or self.dtype, given.get("device") or self.device
        return ShardedValue(
            self.shape,
            self.boxes,
            [change(part) for part in self.parts],
            dtype=dtype,
            device=torch.device(device),
            writes=self.writes,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedValue:
        return self._mapped(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        got, rule = "pickled, for example by torch.save", "be saved by all ranks together: this rank holds a part of it"
        raise CheckpointError(refusal("sharded value of the optimizer's state", got, rule, _REMEDY))

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """For DCP: what this rank writes."""
        planner, metadata = _planner(), _metadata()
        if not self.writes:
            return []
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=chunk, properties=metadata.TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """For DCP: the boxes that this rank has memory for."""
        chunk = _metadata().ChunkStorageMetadata
        return [chunk(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """For DCP: the memory of one box, which it writes or copies into."""
        place = next(number for number, box in enumerate(self.boxes) if box.offsets == tuple(index.offset))
        return self.parts[place]


def _are_alike(one: object, other: object) -> bool:
    return isinstance(one, ShardedValue) and isinstance(other, ShardedValue) and one.boxes == other.boxes


def _planner() -> Any:
    """torch's modules take seconds to import, so only a save imports them."""
    return import_module("torch.distributed.checkpoint.planner")


def _metadata() -> Any:
    return import_module("torch.distributed.checkpoint.metadata")
