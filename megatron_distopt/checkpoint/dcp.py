"""The `.metadata` of torch's distributed checkpoints (DCP), for those who read a checkpoint with torch alone."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import torch

from megatron_distopt.checkpoint.manifest import Manifest, TensorRecord

__all__ = ["metadata_of"]


def metadata_of(manifest: Manifest) -> bytes:
    """The content of `.metadata`; empty where this torch has no distributed checkpoints.

    torch's modules take seconds to import, so they are imported by who saves.
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
