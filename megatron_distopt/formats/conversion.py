"""From any of the formats to any other: recognise what is there, read it as a `Source`, write it.

An iteration of a fork keeps its model files; only the optimizer's part of them is written anew, and
everything lies under another name until it is complete.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.folder import new_save_id
from megatron_distopt.checkpoint.manifest import MAIN, key_of, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import check_groups
from megatron_distopt.checkpoint.source import Source, write_checkpoint
from megatron_distopt.checkpoint.whole_model import is_owned
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.common import check_step, cut
from megatron_distopt.formats.megatron_2023.file_state import Slices, check_all_written
from megatron_distopt.formats.megatron_2023.gathered import write_head
from megatron_distopt.formats.recognise import (
    BESIDE_MODEL,
    FORK_FORMATS,
    OpenedCheckpoint,
    open_with_files,
)
from megatron_distopt.formats.torch_files import write_torch_file
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.owners.muon_options import is_muons_group

_log = logging.getLogger("megatron_distopt")
#: Formats that can be read and written.
TARGETS = ("distopt", "per-rank", "gathered", "plain", "torch")


@dataclass(frozen=True)
class Converted:
    """What `convert` did."""

    found: str  # format of what was read; one of `TARGETS`, or another software's
    written: str  # format of what was written
    path: Path  # of it
    is_iteration: bool  # whether it holds model files too, so that a fork can load it


def convert(
    src: Path,
    dst: Path,
    to: str,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
    dp: int | None = None,
    resume_step: int | None = None,
    is_averaged: bool = False,
) -> Converted:
    """Writes the optimizer state of one format in another.

    Where there are model files in the same iteration, `dst` is a new iteration folder with them,
    for the same tensor- and pipeline-parallel sizes; their random states, schedulers and arguments
    stay as they are. Without them, or with a `dst` that ends in ".distopt", only the state is
    written.

    Args:
        src: see `open_any`.
        dst: must not be there yet; it appears when it is complete.
        to: one of `TARGETS`.
        progress: called with bytes as they are converted.
        dp: number of data-parallel ranks that will read files of a fork of 2023; None for that of
            the run that saved.
        resume_step: updates so far, for a fork's files that lost them.
        is_averaged: whether the averages become the params, in the model files as well.

    Raises:
        CheckpointError: `src` cannot be read, or cannot become that, or the disk fails; `dst` is
            not there then.
    """
    if to not in TARGETS:
        raise CheckpointError(
            f"Format {to!r} is unknown. Write --to with one of {', '.join(TARGETS)}."
        )
    if dst.exists():
        raise CheckpointError(
            f"Target {dst} already exists. Name a folder or file that does not exist yet."
        )
    opened = open_with_files(src, resume_step)
    check_step(opened.source.head, src)
    check_groups(opened.source.head.groups, str(src))
    if is_averaged or to not in ("distopt", "torch"):
        opened = replace(opened, source=_without_averages(opened, src, is_averaged=is_averaged))
    _check_fits(opened.source, src, to)
    if to == "torch":
        write_torch_file(dst, opened.source, progress)
        return Converted(opened.found, to, dst, is_iteration=False)
    is_iteration = to != "distopt" or (bool(opened.files) and dst.suffix != ".distopt")
    ranks = dp  # data-parallel ones, of the run that will read the files
    if ranks is None:
        ranks = opened.files[0].number("data_parallel_size") if opened.files else 1
    if to in ("per-rank", "gathered") and ranks < 1:
        raise CheckpointError(
            f"dp for {src} is {dp}, and must be at least 1. Write --dp 8 for a run on 8 "
            "data-parallel ranks."
        )
    unfinished = dst.with_name(f"{dst.name}.{new_save_id()}")
    try:
        if is_iteration:
            _write_iteration(unfinished, opened, src, to, ranks, progress)
        else:
            write_checkpoint(unfinished, opened.source, progress)
        disk.replace(unfinished, dst)
        disk.sync_folder(dst.parent)
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(unfinished)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"Target {dst} cannot be written: {error}. Free space there, or write elsewhere."
        ) from error
    return Converted(opened.found, to, dst, is_iteration)


@torch.no_grad()
def _without_averages(opened: OpenedCheckpoint, src: Path, *, is_averaged: bool) -> Source:
    """The state without averages, or with averages as its main params and, rounded, as those of the
    model files."""
    source = opened.source
    tensors = {key: each for key, each in source.tensors.items() if kind_of(key) != AVERAGE}
    if is_averaged and len(tensors) == len(source.tensors):
        raise CheckpointError(f"Checkpoint {src} has no averages of params. Leave --averaged out.")
    if not is_averaged:
        if len(tensors) < len(source.tensors):
            _log.warning(
                "the averages of params are left out, because the target has no place for them; "
                "see --averaged"
            )
        return replace(source, tensors=tensors)

    def read(key: str, box: Box) -> Tensor:
        return source.read_box(key_of(AVERAGE, name_of(key)) if kind_of(key) == MAIN else key, box)

    for param in (param for file in opened.files for param in file.params):
        key = key_of(MAIN, param.name)
        if key in tensors and tensors[key].shape == param.placement.global_shape:
            param.model.copy_(cut(param.placement, torch.float32, partial(read, key)))
    return replace(source, tensors=tensors, read_box=read)


def _check_fits(source: Source, src: Path, to: str) -> None:
    """Refuses what a format has no place for."""
    if to == "distopt":
        return
    owned = next(filter(is_owned, source.tensors), None)
    if owned is not None:
        raise CheckpointError(
            f"State {owned!r} of {source.head.inner} in {src} is not cut like its param, and {to} "
            "has no place for such state. Convert to distopt."
        )
    if to == "torch":
        return
    # A fork's optimizer would mistake Muon's momentum for that of SGD.
    of_muon = [
        name
        for group in source.head.groups
        if is_muons_group(group.options)
        for name in group.names
    ]
    if of_muon:
        raise CheckpointError(
            f"The momentum of {of_muon[0]!r} in {src} is Muon's, but {to} can hold only that of "
            "Adam or SGD. Convert to distopt or torch."
        )
    counts = {group.step: group.names[0] for group in reversed(source.head.groups) if group.names}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[-2:]
        raise CheckpointError(
            f"In {src}, {second!r} was updated {other or 0} times and {first!r} {one or 0} times, "
            f"but {to} holds one count for all params. Convert to distopt or torch, which hold a "
            "count for each param."
        )


def _write_iteration(
    folder: Path,
    opened: OpenedCheckpoint,
    src: Path,
    to: str,
    ranks: int,
    progress: Callable[[int], None],
) -> None:
    if not opened.files:
        raise CheckpointError(
            f"Checkpoint {src} has no model files (mp_rank_00/model_optim_rng.pt ...), and {to} "
            "needs them. Convert to distopt or torch, which hold only the optimizer state."
        )
    slices = [
        Slices(file, opened.source, entries, ranks, progress)
        for file, entries in zip(opened.files, opened.entries, strict=True)
    ]
    check_all_written(slices)
    write = next((each.write for each in FORK_FORMATS if each.name == to), write_head)
    for each in slices:
        write(each, folder / each.file.folder.name)
    if to == "distopt":
        write_checkpoint(folder / BESIDE_MODEL, opened.source, progress)
