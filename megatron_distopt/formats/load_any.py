"""Loading whatever is there: a checkpoint of ours, or another software's state through `Source`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_distopt.checkpoint.folder import is_checkpoint
from megatron_distopt.checkpoint.load import Loadable, load_checkpoint, load_state
from megatron_distopt.checkpoint.load_plan import LoadPlan, Read
from megatron_distopt.checkpoint.manifest import Chunk, Manifest, TensorRecord
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.file_state import check_step
from megatron_distopt.formats.recognise import open_any
from megatron_distopt.layout import Box

__all__ = ["load_any"]


def load_any(path: Path, model: WholeModel, everyone: Group, *, resume_step: int | None = None) -> None:
    """Collective: reads this rank's shards from what is at a path; the params are not gathered yet.

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
    source = open_any(path, resume_step=resume_step)
    check_step(source, path)
    check_groups(source.head.groups, str(path))
    return Loadable(_as_manifest(source), str(path), partial(_tensors, source), partial(_read_once, source))


def _as_manifest(source: Source) -> Manifest:
    """Every tensor as one chunk, which `Source.read` gives."""
    records = {
        key: TensorRecord(info.shape, info.dtype, (Chunk(Box.whole(info.shape), 0, 0, 0),))
        for key, info in source.tensors.items()
    }
    return replace(source.head, tensors=records)


def _read_once(source: Source, plan: LoadPlan) -> None:
    """Damaged tensors are found before anything is changed."""
    for _ in _tensors(source, plan):
        pass


def _tensors(source: Source, plan: LoadPlan) -> Iterator[tuple[Read, Tensor]]:
    for read in plan.reads:
        tensor = source.read(read.key)
        if tuple(tensor.shape) != read.chunk.box.sizes:
            rule, remedy = f"have the shape {list(read.chunk.box.sizes)} that the file says", "Report this"
            raise CheckpointError(refusal(f"tensor {read.key!r}", f"shape {list(tensor.shape)}", rule, remedy))
        yield read, tensor
