"""The `.metadata` of torch's distributed checkpoints (DCP), for those who read a checkpoint with torch alone."""

from __future__ import annotations

import pickle

import torch

from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord

try:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )
except ImportError:  # torch before 2.3 has no reader for it either
    Metadata = None  # type: ignore[assignment,misc]

__all__ = ["metadata_of"]


def metadata_of(manifest: Manifest) -> bytes:
    """The content of `.metadata`; empty where this torch has no distributed checkpoints."""
    if Metadata is None:
        return b""
    state = {key: _tensor_metadata_of(record) for key, record in manifest.tensors.items()}
    storage = {
        MetadataIndex(key, torch.Size(chunk.box.offsets)): _StorageInfo(
            manifest.files[chunk.file].name, chunk.start, chunk.nbytes
        )
        for key, record in manifest.tensors.items()
        for chunk in record.chunks
    }
    meta = StorageMeta(save_id=manifest.save_id)
    return pickle.dumps(Metadata(state, planner_data={}, storage_data=storage, storage_meta=meta))  # type: ignore[arg-type]


def _tensor_metadata_of(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)) for chunk in record.chunks
    ]
    properties = TensorProperties(dtype=getattr(torch, record.dtype))
    return TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
