"""Makes a `Loadable` of state that a Megatron saved for a rank's own shards, without their places
in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import dtype_name
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import (
    Chunk,
    Manifest,
    TensorRecord,
    key_of,
    kind_of,
    name_of,
)
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.layout import Box


def group_record(
    share: Share, names: Iterable[str], options: Mapping[str, Any], step: int | None
) -> GroupRecord:
    """The record of one saved param group; `names` are the names of its params in the optimizer."""
    in_model = dict.fromkeys(share.placements[name].name for name in names)
    return GroupRecord(tuple(in_model), options_of(options)[0], step)


def loadable_of_shards(
    model: WholeModel,
    head: Manifest,
    where: str,
    kinds_of: Callable[[Share, str], Mapping[str, torch.dtype]],
    values_of: Callable[[OwnedPiece, str], Tensor],
) -> Loadable:
    """A state in which every piece that this rank owns is one chunk.

    Args:
        model: the run that loads it.
        head: everything except the tensors.
        where: the place of the state, for errors.
        kinds_of: takes a param's name in the optimizer and returns the saved kinds of state and
            their dtypes.
        values_of: reads the elements of a piece of one kind, 1-D, in the param's order.
    """
    pieces: dict[str, dict[Box, OwnedPiece]] = {}
    for piece in owned_pieces(model):
        pieces.setdefault(piece.placement.name, {})[piece.piece.in_global] = piece
    tensors: dict[str, TensorRecord] = {}
    for share in model.shares:
        for name, placement in share.placements.items():
            boxes = pieces.get(placement.name, {})
            chunks = tuple(Chunk(box, 0, 0, 0) for box in boxes)
            for kind, dtype in kinds_of(share, name).items():
                record = TensorRecord(placement.global_shape, dtype_name(dtype), chunks)
                tensors[key_of(kind, placement.name)] = record

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        for one in reads:
            owned = pieces[name_of(one.key)][one.chunk.box]
            stretch = values_of(owned, kind_of(one.key)).view(owned.piece.sizes)
            in_box = stretch[owned.piece.inside.as_slices()]
            yield one, in_box[one.in_chunk.as_slices()]

    return Loadable(replace(head, tensors=tensors), where, read)
