"""Gathered file, Megatron-LM 23.06 and Megatron-DeepSpeed: the state of all data-parallel ranks gathered in one file.

::

    mp_rank_TT[_PPP]/distrib_optim.pt
    {chunk: {grad dtype: {"param", "exp_avg", "exp_avg_sq": fp32 1-D [numel padded to a multiple of the ranks]}},
     "megatron_distopt": {"format": 1, "step": updates so far, where they are counted,
                          "num_skipped": steps that were skipped, where there are any}}

The order is the reverse of that in which the fork registers its params; the last key is there where this package wrote
the file. The model file has the rest: {"optimizer": {"optimizer": {"param_groups": ...}, "grad_scaler": ...}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.grad_buffers import buffers_of, grads_in_fp32
from megatron_distopt.formats.megatron_2023.model_file import MODEL, ModelFile
from megatron_distopt.formats.megatron_2023.param_groups import groups_by_rule, kept_in
from megatron_distopt.formats.megatron_2023.part import OURS, Part, ours_in, skipped_in
from megatron_distopt.formats.megatron_2023.slices import Slices
from megatron_distopt.formats.safe import load_safely, save_whole
from megatron_distopt.layout import BufferLayout

__all__ = ["GATHERED", "head_gathered", "is_gathered", "read_gathered", "write_gathered"]

GATHERED = "distrib_optim.pt"
_MAIN, _FORMAT = "param", 1
#: What the fork's own optimizer asks for even before the first update.
_ADAM = ("exp_avg", "exp_avg_sq")
#: Padding is less than the number of ranks that wrote a file; no run has more than these.
_LARGEST_PADDING_NUMEL = 1 << 16
_SAME_SAVE = "Give the optimizer state and the model of one save, unchanged"


def is_gathered(file: ModelFile) -> bool:
    """Whether a gathered file lies beside a model file."""
    return (file.folder / GATHERED).is_file()


def read_gathered(file: ModelFile) -> Part:
    """The state beside one model file.

    Raises:
        CheckpointError: it is damaged, or of another model, or in an order that nobody knows.
    """
    path = file.folder / GATHERED
    state, entry = load_safely(path), file.state.get("optimizer")
    if not isinstance(state, Mapping) or not isinstance(entry, Mapping) or "optimizer" not in entry:
        got, remedy = "no gathered state, or a model file without param groups", _SAME_SAVE
        raise CheckpointError(refusal(f"file {path}", got, "be what a fork's distributed optimizer saves", remedy))
    buffers = buffers_of(file, range(len(file.params)), 1, in_fp32=_adds_up_in_fp32(state))
    tensors = {place: _tensors(state, place, layout, path) for place, layout in buffers.items()}
    if len({frozenset(each) for each in tensors.values()}) > 1:
        got, rule = "other tensors in one grad buffer than in another", "hold the same of all params"
        raise CheckpointError(refusal(f"file {path}", got, rule, _SAME_SAVE))
    groups = groups_by_rule(file, entry["optimizer"]["param_groups"])
    step = ours_in(state).get("step")
    if step is not None:
        groups = tuple(replace(group, step=int(step)) for group in groups)
    elif OURS not in state:
        _check_order(file, [[file.params[number].model.dtype for number in group.members] for group in groups], path)
    place_of = {slot.name: (place, slot.in_buffer) for place, layout in buffers.items() for slot in layout.slots}

    def read(kind: str, number: int) -> Tensor:
        place, in_buffer = place_of[str(number)]
        flat = tensors[place][_MAIN if kind == MAIN else kind]
        return flat[in_buffer.as_slice()].view(file.params[number].model.shape)

    kinds = {kind: tensor.dtype for kind, tensor in next(iter(tensors.values())).items() if kind != _MAIN}
    return Part(file, groups, kinds, read, kept_in(file.state, ("opt_param_scheduler",)), skipped_in(state))


def _adds_up_in_fp32(state: Mapping[Any, Any]) -> bool:
    """Gradients that are all fp32 are those of an fp32 model, or of a run that adds them up in fp32."""
    chunks = [dtypes for key, dtypes in state.items() if key != OURS]
    return all(isinstance(dtypes, Mapping) and set(dtypes) == {torch.float32} for dtypes in chunks)


def _tensors(
    state: Mapping[Any, Any], place: tuple[int, torch.dtype], layout: BufferLayout, path: Path
) -> dict[str, Tensor]:
    """Of one buffer, checked."""
    (chunk, dtype), numel = place, layout.buckets[0].numel_unpadded
    by_dtype = state.get(chunk)
    tensors = by_dtype.get(dtype) if isinstance(by_dtype, Mapping) else None
    if not isinstance(tensors, Mapping) or _MAIN not in tensors:
        got, rule = f"without chunk {chunk}, grads {dtype}", "hold every grad buffer of the model"
        raise CheckpointError(refusal(f"file {path}", got, rule, _SAME_SAVE))
    for kind, tensor in tensors.items():
        shape = list(tensor.shape) if torch.is_tensor(tensor) else []
        if len(shape) != 1 or not 0 <= shape[0] - numel < _LARGEST_PADDING_NUMEL:
            got, rule = f"{kind} of {shape} in chunk {chunk}", f"hold the model's {numel} elements and padding"
            remedy = "Convert a checkpoint of a model without frozen params; a file does not say which they are"
            raise CheckpointError(refusal(f"file {path}", got, rule, remedy))
    return dict(tensors)


def _check_order(file: ModelFile, dtypes: list[list[torch.dtype]], path: Path) -> None:
    """The fork's own optimizer writes a group of fp32 and 16-bit params in another order than it says."""
    if any(torch.float32 in group and len(set(group)) > 1 for group in dtypes):
        got = "written by the fork's own optimizer for a param group that mixes fp32 with 16-bit params"
        rule = "be in an order that is known; that optimizer saves such groups permuted"
        remedy = "Convert what a run with this package installed saves, or one without the distributed optimizer"
        raise CheckpointError(refusal(f"file {path}", got, rule, remedy))


def write_gathered(slices: Slices, folder: Path, ranks: int) -> None:
    """The model file and the gathered one.

    Args:
        slices: of one model file.
        folder: of the new model file.
        ranks: data-parallel; a fork's own optimizer reads the file at this number only.
    """
    buffers = buffers_of(slices.file, slices.trained, ranks, in_fp32=grads_in_fp32(slices.file))
    is_adam = any("betas" in group.options for group in slices.groups)
    kinds = slices.kinds or (_ADAM if is_adam else ())
    step = {} if slices.step is None else {"step": slices.step}
    state: dict[Any, Any] = {OURS: {"format": _FORMAT, **step, **slices.skipped()}}
    for (chunk, dtype), layout in buffers.items():
        flats = {kind: torch.zeros(layout.numel) for kind in (MAIN, *kinds)}
        for slot in layout.slots:
            for kind, flat in flats.items():
                flat[slot.in_buffer.as_slice()] = slices.read(kind, int(slot.name)).reshape(-1)
        state.setdefault(chunk, {})[dtype] = {_MAIN: flats.pop(MAIN), **flats}
    save_whole(state, folder / GATHERED)
    save_whole(head_gathered(slices, ranks), folder / MODEL)


def head_gathered(slices: Slices, ranks: int | None = None) -> dict[str, Any]:
    """The model file with the param groups of a gathered file; beside a checkpoint of this package's own, too.

    Args:
        slices: of the model file.
        ranks: see `Slices.model_state`.
    """
    head = {"optimizer": {"param_groups": list(slices.inner_groups())}, **slices.grad_scaler()}
    return {**slices.model_state(ranks), "optimizer": head, **slices.beside()}
