"""Loads a checkpoint of this package, or the state that another software wrote, into a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_distopt.checkpoint.folder import is_checkpoint
from megatron_distopt.checkpoint.load import load_checkpoint, load_state
from megatron_distopt.checkpoint.load_plan import Loadable, Read
from megatron_distopt.checkpoint.manifest import Chunk, TensorRecord
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import check_step
from megatron_distopt.formats.recognise import open_any
from megatron_distopt.layout import Box


def load_any(path: Path, model: WholeModel, everyone: Group, *, resume_step: int | None = None) -> None:
    """Collective: reads this rank's shards from what is at a path; the params are not gathered yet.

    Of another software's files each rank reads what it needs, and reads it once.

    Args:
        path: a checkpoint of ours, or anything that `open_any` opens; the same on all ranks.
        model: with this rank's optimizers.
        everyone: all ranks that hold a part of the model.
        resume_step: updates so far, for files that lost them.

    Raises:
        CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    if is_checkpoint(path):
        load_checkpoint(path, model, everyone)
    else:
        load_state(lambda: _opened(path, resume_step), model, everyone)


def _opened(path: Path, resume_step: int | None) -> Loadable:
    """With every tensor as one chunk. What a plan needs is read before any state changes, so that damage is found."""
    source = open_any(path, resume_step=resume_step)
    check_step(source.head, path)
    check_groups(source.head.groups, str(path))
    parts: dict[str, tuple[Box, Tensor]] = {}  # for each key the smallest box that holds what is needed

    def verify(reads: Sequence[Read]) -> None:
        needed: dict[str, list[Box]] = {}
        for each in reads:
            needed.setdefault(each.key, []).append(each.box)
        for key, boxes in needed.items():
            box = _around(boxes)
            values = source.read_box(key, box)
            if tuple(values.shape) != box.sizes:
                raise CheckpointError(
                    f"Tensor {key!r} in {path} has shape {list(values.shape)} where the file says "
                    f"{list(box.sizes)}. Load an earlier checkpoint; this one is damaged."
                )
            parts[key] = box, values

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        for each in reads:
            box, values = parts[each.key]
            yield each, values[each.box.relative_to(box.offsets).as_slices()]

    records = {
        key: TensorRecord(info.shape, info.dtype, (Chunk(Box.whole(info.shape), 0, 0, 0),))
        for key, info in source.tensors.items()
    }
    return Loadable(replace(source.head, tensors=records), str(path), read, verify)


def _around(boxes: list[Box]) -> Box:
    """The smallest box that holds all of them."""
    offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = map(max, zip(*(box.stops for box in boxes), strict=True))
    return Box(offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True)))
