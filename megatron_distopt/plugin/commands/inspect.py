"""`megatron-distopt inspect`: what a checkpoint holds, without reading a tensor."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.plugin.commands.answer import Answer
from megatron_distopt.plugin.commands.held import Held, files_of, held_at, params_of
from megatron_distopt.plugin.commands.inspect_text import lines
from megatron_distopt.plugin.commands.places import find
from megatron_distopt.plugin.commands.tensors import nbytes_of

__all__ = ["answer"]


def answer(parsed: argparse.Namespace) -> Answer:
    """Reads no tensor.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    held = held_at(find(parsed.checkpoint))
    params = params_of(held)
    return Answer(_document(held), lambda width: lines(held, params, width))


def _document(held: Held) -> dict[str, Any]:
    manifest = held.manifest
    return {
        "checkpoint": str(held.place.path),
        "chosen": held.place.chosen,
        "save_id": manifest.save_id,
        "about": dict(manifest.about),
        "inner": manifest.inner,
        "loss_scale": dict(manifest.loss_scale),
        "num_skipped": manifest.num_skipped,
        "groups": [_group_document(group) for group in manifest.groups],
        "files": [
            {"name": file.name, "nbytes": file.nbytes, "nbytes_found": held.sizes.get(file.name), "crc32": file.crc32}
            for file in manifest.files
        ],
        "tensors": {key: _tensor_document(held, key, info) for key, info in held.tensors.items()},
    }


def _group_document(group: GroupRecord) -> dict[str, Any]:
    scalars = {key: scalar.value for key, scalar in group.scalars.items()}
    return {"names": list(group.names), "options": dict(group.options), "step": group.step, "scalars": scalars}


def _tensor_document(held: Held, key: str, info: TensorInfo) -> dict[str, Any]:
    files = [held.manifest.files[number].name for number in files_of(held, key)]
    return {"shape": list(info.shape), "dtype": info.dtype, "nbytes": nbytes_of(info), "files": files}
