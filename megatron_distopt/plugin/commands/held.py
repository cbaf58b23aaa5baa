"""What a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import Manifest, key_of
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.plugin.commands.places import Place, open_place
from megatron_distopt.plugin.commands.tensors import kinds_by_name, nbytes_of
from megatron_distopt.plugin.commands.tree import Param

__all__ = ["Held", "files_of", "held_at", "params_of"]


@dataclass(frozen=True)
class Held:
    """What a checkpoint holds.

    Args:
        place: where it is.
        manifest: its own, or that of another format: without files, and tensors without chunks.
        tensors: of both.
        sizes: bytes of the files that are there, by name.
    """

    place: Place
    manifest: Manifest
    tensors: Mapping[str, TensorInfo]
    sizes: Mapping[str, int]


def held_at(place: Place) -> Held:
    """Reads the manifest and the sizes of files.

    Raises:
        CheckpointError: it is damaged.
    """
    if not place.is_ours:
        source = open_place(place)
        return Held(place, source.head, source.tensors, {})
    manifest = read_manifest(place.path)
    tensors = {key: TensorInfo(record.shape, record.dtype) for key, record in manifest.tensors.items()}
    paths = [place.path / file.name for file in manifest.files]
    return Held(place, manifest, tensors, {path.name: path.stat().st_size for path in paths if path.is_file()})


def params_of(held: Held) -> list[Param]:
    """All tensors by param."""
    group_of = {name: number for number, group in enumerate(held.manifest.groups) for name in group.names}
    kinds = kinds_by_name(held.tensors)
    return [_param(held, name, kinds[name], group_of.get(name)) for name in kinds]


def _param(held: Held, name: str, kinds: Mapping[str, TensorInfo], group: int | None) -> Param:
    shape = next(iter(kinds.values())).shape
    return Param(
        name,
        shape,
        math.prod(shape),
        sum(map(nbytes_of, kinds.values())),
        {kind: info.dtype for kind, info in kinds.items()},
        group,
        frozenset(number for kind in kinds for number in files_of(held, key_of(kind, name))),
    )


def files_of(held: Held, key: str) -> list[int]:
    """Numbers of the files in which a tensor lies."""
    record = held.manifest.tensors.get(key)
    return sorted({chunk.file for chunk in record.chunks}) if record is not None else []
