"""Gathered file, Megatron-LM 23.06 and Megatron-DeepSpeed: the state of all data-parallel ranks
gathered in one file.

::

    mp_rank_TT[_PPP]/distrib_optim.pt
    {chunk: {grad dtype: {"param", "exp_avg", "exp_avg_sq":
                          fp32 1-D [numel padded to a multiple of the ranks]}},
     "megatron_distopt": {"format": 1, "step": updates so far, where they are counted,
                          "num_skipped": steps that were skipped, where there are any}}

The order is that of the grad buffer, the reverse of that in which the fork registers its params.
The last key is there where this package wrote the file; the fork's own optimizer does not look at
it. The padding of the fork's own files is what happened to be in memory, so nothing is read from
it, and a file fits any number of data-parallel ranks. The model file has the rest: {"optimizer":
{"optimizer": {"param_groups": ...}, "grad_scaler": ...}}.

The fork's own optimizer writes the params of a group that mixes fp32 with 16 bits in another order
than it says (NVIDIA/Megatron-LM issue 2777), so that a file of its for such a model cannot be read.
Experts are in no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import the_step
from megatron_distopt.formats.megatron_2023.file_state import (
    NUM_SKIPPED,
    OURS,
    FileState,
    Slices,
    entries_in,
    groups_by_rule,
    ours_in,
    skipped_in,
)
from megatron_distopt.formats.megatron_2023.model_file import (
    MODEL,
    ModelFile,
    buffers_of,
    grads_in_fp32,
)
from megatron_distopt.formats.megatron_2023.saved_shards import Origin
from megatron_distopt.formats.pickles import load_file, save_whole
from megatron_distopt.layout import BufferLayout

_GATHERED = "distrib_optim.pt"
#: The file's key of main params. Moments have the keys of the inner optimizer.
_MAIN_IN_FILE = "param"
_FORMAT = 1
#: What the fork's own optimizer asks for even before the first update.
_ADAM = ("exp_avg", "exp_avg_sq")
#: Padding is less than the number of ranks that wrote a file; no run has more than these.
_LARGEST_PADDING_NUMEL = 1 << 16
_SAME_SAVE = (
    "Give the optimizer state and the model of one save, of a model without frozen params, "
    "because a file does not say which params are frozen"
)


def gathered_state(
    buffers: Mapping[tuple[int, torch.dtype], Mapping[str, Tensor]],
    step: int | None,
    num_skipped: int,
) -> dict[Any, Any]:
    """What a file holds: by chunk and grad dtype 1-D main params and moments by kind, and counts of
    steps."""
    counts = {"step": step, NUM_SKIPPED: num_skipped or None}
    known = {key: count for key, count in counts.items() if count is not None}
    state: dict[Any, Any] = {OURS: {"format": _FORMAT} | known}
    for (chunk, dtype), tensors in buffers.items():
        in_file = {
            _MAIN_IN_FILE if kind == MAIN else kind: tensor for kind, tensor in tensors.items()
        }
        state.setdefault(chunk, {})[dtype] = in_file
    return state


def moments_in_file(kept: Iterable[str], *, is_adam: bool) -> list[str]:
    """The moments that a file holds, in order. Adam's are in it even before the first update."""
    return sorted(kept) or list(_ADAM if is_adam else ())


@dataclass(frozen=True, eq=False)
class GatheredFile:
    """A file, opened."""

    state: Mapping[Any, Any]
    origin: Origin  # for errors

    @property
    def step(self) -> int | None:
        """Updates so far; None where the file does not say it."""
        found = ours_in(self.state).get("step")
        return None if found is None else int(found)

    @property
    def num_skipped(self) -> int:
        return skipped_in(self.state)

    def tensors(self, chunk: int, dtype: torch.dtype, numel: int) -> dict[str, Tensor]:
        """Those of the grad buffer of a chunk with grads of a dtype, by kind, 1-D: `numel` elements
        and padding."""
        where = f"chunk {chunk}, grads {dtype}"
        tensors = _table(_table(self.state, chunk), dtype)
        if _MAIN_IN_FILE not in tensors:
            raise CheckpointError(
                f"{self.origin.what} has no {where}, and must hold every grad buffer of the "
                f"model. {self.origin.remedy}."
            )
        for kind, tensor in tensors.items():
            shape = list(tensor.shape) if torch.is_tensor(tensor) else []
            if len(shape) != 1 or not 0 <= shape[0] - numel < _LARGEST_PADDING_NUMEL:
                raise CheckpointError(
                    f"{self.origin.what} holds {kind} of shape {shape} in {where}, and must hold "
                    f"the model's {numel} elements and padding. {self.origin.remedy}."
                )
        return {MAIN if kind == _MAIN_IN_FILE else kind: tensor for kind, tensor in tensors.items()}

    def check_order(self, *, is_mixed: bool, remedy: str) -> None:
        """Refuses a file that may not have the order of the grad buffer.

        `is_mixed` says whether there is a param group with params of fp32 and of 16 bits.
        """
        if is_mixed and OURS not in self.state:
            raise CheckpointError(
                f"{self.origin.what} was written by the fork's own optimizer for a param group "
                "that mixes fp32 with 16-bit params, and that optimizer saves such groups in the "
                f"wrong order. {remedy}."
            )


def _table(table: object, key: object) -> Mapping[Any, Any]:
    """The table that a file has under a key; empty where it has something else."""
    found = table.get(key) if isinstance(table, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_gathered(file: ModelFile) -> bool:
    return (file.folder / _GATHERED).is_file()


def read_gathered(file: ModelFile) -> FileState:
    path = file.folder / _GATHERED
    state = load_file(path)
    entry = file.state.get("optimizer")
    origin = Origin(f"File {path}", _SAME_SAVE)
    if not isinstance(state, Mapping) or not isinstance(entry, Mapping) or "optimizer" not in entry:
        raise CheckpointError(
            f"File {path} holds no gathered state, or {file.path} holds no param groups. Both "
            f"must be files of a fork's distributed optimizer. {_SAME_SAVE}."
        )
    gathered = GatheredFile(state, origin)
    # Gradients that are all fp32 are those of an fp32 model, or of a run that adds them up in fp32.
    chunks = [dtypes for key, dtypes in state.items() if key != OURS]
    in_fp32 = all(
        isinstance(dtypes, Mapping) and set(dtypes) == {torch.float32} for dtypes in chunks
    )
    buffers = buffers_of(file, range(len(file.params)), 1, in_fp32=in_fp32)
    tensors = {
        place: gathered.tensors(*place, layout.buckets[0].numel_unpadded)
        for place, layout in buffers.items()
    }
    if len({frozenset(each) for each in tensors.values()}) > 1:
        raise CheckpointError(
            f"File {path} holds different tensors in two grad buffers, and must hold the same "
            f"kinds for all params. {_SAME_SAVE}."
        )
    saved = entry["optimizer"]["param_groups"]
    groups = groups_by_rule(file, saved)
    step = the_step(saved, file.folder) if gathered.step is None else gathered.step
    dtypes = [{file.params[number].model.dtype for number in group.members} for group in groups]
    is_mixed = any(torch.float32 in of_group and len(of_group) > 1 for of_group in dtypes)
    remedy = (
        "Convert what a run with this package installed saves, or what a run without the "
        "distributed optimizer saves"
    )
    gathered.check_order(is_mixed=is_mixed, remedy=remedy)
    place_of = {
        slot.name: (place, slot.in_buffer)
        for place, layout in buffers.items()
        for slot in layout.slots
    }

    def read(kind: str, number: int) -> Tensor:
        place, in_buffer = place_of[str(number)]
        return tensors[place][kind][in_buffer.as_slice()].view(file.params[number].model.shape)

    kinds = {
        kind: tensor.dtype for kind, tensor in next(iter(tensors.values())).items() if kind != MAIN
    }
    entries = entries_in(file.state)
    return FileState(file, groups, step, kinds, read, entries, gathered.num_skipped)


def write_gathered(slices: Slices, folder: Path) -> None:
    """Writes a model file and the gathered one into a new folder.

    A fork's own optimizer reads them at one number of data-parallel ranks only.
    """
    in_fp32 = grads_in_fp32(slices.file)
    layouts = buffers_of(slices.file, slices.trained, slices.ranks, in_fp32=in_fp32)
    moments = moments_in_file(
        slices.kinds, is_adam=any("betas" in group.options for group in slices.groups)
    )
    buffers = {place: _gathered(slices, layout, moments) for place, layout in layouts.items()}
    save_whole(
        gathered_state(buffers, slices.step, slices.source.head.num_skipped), folder / _GATHERED
    )
    write_head(slices, folder, fits_ranks=True)


def _gathered(slices: Slices, layout: BufferLayout, moments: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of one grad buffer; padding is zero."""
    flats = {kind: torch.zeros(layout.numel) for kind in (MAIN, *moments)}
    for slot in layout.slots:
        for kind, flat in flats.items():
            flat[slot.in_buffer.as_slice()] = slices.read(kind, int(slot.name)).reshape(-1)
    return flats


def write_head(slices: Slices, folder: Path, *, fits_ranks: bool = False) -> None:
    """Writes the model file with the param groups that go with a gathered file, or with a
    checkpoint of this package."""
    groups = [{**group.options, **slices.count()} for group in slices.groups]
    head = {"optimizer": {"param_groups": groups}, **slices.grad_scaler()}
    state = {**slices.model_state(fits_ranks=fits_ranks), "optimizer": head}
    save_whole({**state, **slices.entries.also_saved}, folder / MODEL)
