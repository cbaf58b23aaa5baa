"""Loading whatever is there: a checkpoint of ours, or another software's state through `Source`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_distopt.checkpoint.exchange import check_step, open_any
from megatron_distopt.checkpoint.folder import is_checkpoint
from megatron_distopt.checkpoint.load import install, load_checkpoint, names_of_all, separate
from megatron_distopt.checkpoint.load_plan import LoadPlan, Read, check_names, plan_load
from megatron_distopt.checkpoint.manifest import Chunk, Manifest, TensorRecord
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import CheckpointError, refusal
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
        return
    names = names_of_all(model, everyone)
    source, plan = raise_together(lambda: _opened(path, model, names, resume_step), everyone, "load")
    ready = plan_load(plan.manifest, str(path), model) if separate(plan.groups) else plan
    raise_together(lambda: install(ready, model, _tensors(source, ready)), everyone, "load")


def _opened(path: Path, model: WholeModel, names: set[str], resume_step: int | None) -> tuple[Source, LoadPlan]:
    source = open_any(path, resume_step=resume_step)
    check_step(source, path)
    check_groups(source.head.groups, str(path))
    manifest = _as_manifest(source)
    check_names(manifest, str(path), model, names)
    plan = plan_load(manifest, str(path), model)
    for _ in _tensors(source, plan):
        pass  # read once before anything is changed: what is damaged shows here
    return source, plan


def _as_manifest(source: Source) -> Manifest:
    """Every tensor as one chunk, which `Source.read` gives."""
    records = {
        key: TensorRecord(info.shape, info.dtype, (Chunk(Box.whole(info.shape), 0, 0, 0),))
        for key, info in source.tensors.items()
    }
    return replace(source.head, tensors=records)


def _tensors(source: Source, plan: LoadPlan) -> Iterator[tuple[Read, Tensor]]:
    for read in plan.reads:
        tensor = source.read(read.key)
        if tuple(tensor.shape) != read.chunk.box.sizes:
            rule, remedy = f"have the shape {list(read.chunk.box.sizes)} that the file says", "Report this"
            raise CheckpointError(refusal(f"tensor {read.key!r}", f"shape {list(tensor.shape)}", rule, remedy))
        yield read, tensor
