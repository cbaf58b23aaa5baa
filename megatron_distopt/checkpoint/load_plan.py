"""What this rank has to read, planned and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from megatron_distopt.checkpoint.load_groups import GroupMatch, match_groups
from megatron_distopt.checkpoint.manifest import MAIN, Chunk, Manifest, TensorRecord, key_of
from megatron_distopt.checkpoint.owned_state import owned_by_name
from megatron_distopt.checkpoint.saved_by_name import SavedByName
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box


@dataclass(frozen=True, eq=False)
class ReadTarget:
    """Where a part of what is read goes.

    Args:
        piece: of the state.
        kind: of the tensor: "main", or the inner optimizer's name for what it keeps.
        in_chunk: the part of the tensor that is read.
        in_piece: the same elements in the piece.
    """

    piece: OwnedPiece
    kind: str
    in_chunk: Box
    in_piece: Box


@dataclass(frozen=True, eq=False)
class Read:
    """One tensor to read from a file, and the places that its elements go to."""

    key: str
    chunk: Chunk
    dtype: torch.dtype
    targets: tuple[ReadTarget, ...]


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Everything that this rank reads.

    Args:
        manifest: of the checkpoint.
        reads: in the order of files and of the bytes in them.
        groups: of the run, as far as the checkpoint has something for them.
        anew: names of params of this rank whose state begins anew, see [Note: another kind of optimizer] in
            saved_by_name.py.
        owned: what owners of whole params read, without targets, in the order of `reads`; each with the param's name.
    """

    manifest: Manifest
    reads: tuple[Read, ...]
    groups: tuple[GroupMatch, ...]
    anew: tuple[str, ...] = ()
    owned: Mapping[Read, str] = field(default_factory=dict)


def plan_load(manifest: Manifest, where: str, model: WholeModel) -> LoadPlan:
    """Finds in a checkpoint everything that this rank owns.

    Args:
        manifest: of the checkpoint.
        where: its path, for errors.
        model: will take the state.

    Raises:
        CheckpointError: a param is missing, has another shape, or its group is ambiguous.
    """
    saved = SavedByName(manifest, where, model)
    groups = tuple(match for share in model.shares for match in match_groups(share, saved))
    targets: dict[tuple[str, Chunk], list[ReadTarget]] = {}
    for piece in owned_pieces(model):
        for key, chunk, target in _targets_of(piece, saved):
            targets.setdefault((key, chunk), []).append(target)
    reads = [
        Read(key, chunk, getattr(torch, manifest.tensors[key].dtype), tuple(found))
        for (key, chunk), found in targets.items()
    ]
    owned = {read: name for share in model.shares for name, read in _owned_reads(share, saved)}
    return LoadPlan(manifest, _in_order(reads), groups, saved.anew, {read: owned[read] for read in _in_order(owned)})


def _in_order(reads: Iterable[Read]) -> tuple[Read, ...]:
    return tuple(sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start)))


def _owned_reads(share: Share, saved: SavedByName) -> Iterator[tuple[str, Read]]:
    """What this rank reads of params that it owns whole, with their names in the whole model."""
    mine = owned_by_name(share)
    for placement in share.placements.values():
        for key in saved.owned_of(placement) if placement.name in mine else ():
            record = saved.manifest.tensors[key]
            for chunk in record.chunks:
                yield placement.name, Read(key, chunk, getattr(torch, record.dtype), ())


def _targets_of(piece: OwnedPiece, saved: SavedByName) -> Iterator[tuple[str, Chunk, ReadTarget]]:
    name = saved.name_of(piece.placement)
    for kind in (MAIN, *saved.kinds_of(piece.placement)):
        key = key_of(kind, name)
        record = saved.manifest.tensors[key]
        wanted = _wanted(piece, key, record, saved)
        what = f"tensor {key!r} in checkpoint {saved.where}"
        if wanted is not None:
            for chunk, target in find_targets(piece, kind, wanted, record.chunks, what, saved.another):
                yield key, chunk, target


def find_targets(
    piece: OwnedPiece, kind: str, wanted: Box, chunks: Iterable[Chunk], what: str, remedy: str
) -> Iterator[tuple[Chunk, ReadTarget]]:
    """Finds the chunks that hold elements of a piece.

    Args:
        piece: of the state.
        kind: "main", or the inner optimizer's name for what it keeps.
        wanted: the elements of the piece, in the whole param, that the chunks must hold.
        chunks: of one tensor; disjoint.
        what: what errors call the tensor.
        remedy: for errors.

    Raises:
        CheckpointError: after the last chunk, where elements are missing.
    """
    found = 0
    for chunk in chunks:
        both = wanted.intersect(chunk.box)
        if both is not None:
            found += both.numel
            in_piece = both.relative_to(piece.piece.in_global.offsets)
            yield chunk, ReadTarget(piece, kind, both.relative_to(chunk.box.offsets), in_piece)
    if found != wanted.numel:
        got, rule = f"{found} elements of {wanted}", f"hold all {wanted.numel} which this rank owns, each once"
        raise CheckpointError(refusal(what, got, rule, remedy))


def _wanted(piece: OwnedPiece, key: str, record: TensorRecord, saved: SavedByName) -> Box | None:
    """The elements of a piece that the checkpoint has to hold; None where the piece is padding that it lacks.

    Raises:
        CheckpointError: the param has another shape there.
    """
    ours = piece.placement.global_shape
    is_padding_alone = piece.placement.is_padded and record.shape[1:] == ours[1:] and len(record.shape) == len(ours)
    if record.shape != ours and not is_padding_alone:
        got, rule = f"of shape {list(record.shape)}", f"have the shape {list(ours)} of the run"
        raise CheckpointError(refusal(f"tensor {key!r} in checkpoint {saved.where}", got, rule, saved.another))
    return piece.piece.in_global.intersect(Box.whole(record.shape))
