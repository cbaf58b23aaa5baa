"""The manifest for torch's own reader of checkpoints, as the pickle `.metadata`. This package never
reads one."""

from __future__ import annotations

import pickle
from importlib import import_module

import torch

from megatron_distopt.checkpoint.manifest import Manifest


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
