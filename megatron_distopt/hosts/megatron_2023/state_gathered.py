"""The gathered file of a running fork: gathered and written by the first data-parallel rank, read and scattered by it.

See formats/megatron_2023/gathered.py for the layout. A run with buckets of its own has another order than the file, so
its ranks send each other what belongs into their parts of it (resplit.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.comm import Group, exchange, gather_to_first, raise_together, scatter_from_first
from megatron_distopt.formats.megatron_2023.gathered import (
    GatheredFile,
    experts_filename,
    gathered_state,
    moments_in_file,
    open_gathered,
)
from megatron_distopt.formats.megatron_2023.plain import Origin
from megatron_distopt.formats.pickles import save_whole
from megatron_distopt.hosts.megatron_2023.buffers import GradBuffer
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer
from megatron_distopt.hosts.megatron_2023.resplit import Facts, joined, keys_of, owned_in, part_in_file, take_part
from megatron_distopt.hosts.megatron_2023.state import (
    check_moments,
    check_step,
    install_state,
    updates_so_far,
)
from megatron_distopt.optimizer.main_params import FlatParam

_REMEDY = (
    "Load a checkpoint of this model at the same tensor- and pipeline-parallel size, or start from its weights with "
    "--no-load-optim"
)
_PERMUTED = "Start from the weights with --no-load-optim, or convert the run before its first mixed save"


@dataclass(frozen=True)
class _Part:
    """What goes into one file: the buffers of one group of ranks.

    Args:
        filename: experts are not in the fork's layout and have a file of their own.
        group: ranks; the first one writes and reads.
        buffers: sharded over it.
    """

    filename: str
    group: Group
    buffers: tuple[GradBuffer, ...]


@torch.no_grad()
def save_gathered(optimizer: BuiltOptimizer, filename: str) -> None:
    """Collective: gathers this pipeline stage and tensor-parallel slice on its first rank, which writes the file.

    Raises:
        CheckpointError: on the rank that cannot write; the others raise RanksDisagreeError instead of waiting for it.
    """
    parts = _parts(optimizer, filename)
    states = [_state_of(optimizer, part) for part in parts]
    raise_together(lambda: _write_all(parts, states), optimizer.everyone)


def _state_of(optimizer: BuiltOptimizer, part: _Part) -> dict[Any, Any]:
    facts = joined(exchange(Facts(keys_of(optimizer, with_all_mains=True), None, {}), part.group))
    buffers = {
        (buffer.plan.chunk, buffer.plan.dtype): _gather(optimizer, buffer, part.group, facts) for buffer in part.buffers
    }
    return gathered_state(buffers, updates_so_far(optimizer), optimizer.sharded.num_skipped)


def _write_all(parts: Sequence[_Part], states: Sequence[Mapping[Any, Any]]) -> None:
    for part, state in zip(parts, states, strict=True):
        if part.group.rank == 0:
            save_whole(state, Path(part.filename))


@torch.no_grad()
def load_gathered(optimizer: BuiltOptimizer, filename: str, head_step: int | None) -> None:
    """Collective: the first ranks read their files, every rank gets its shards; the params are not gathered yet.

    Args:
        optimizer: takes the state over.
        filename: as the fork names it.
        head_step: the update count that came with `load_state_dict`.

    Raises:
        CheckpointError: on a rank that cannot read its file, before anything is changed.
        RanksDisagreeError: on the others, with that rank's text.
    """
    parts, everyone = _parts(optimizer, filename), optimizer.everyone
    files = raise_together(lambda: [_read(optimizer, part) for part in parts], everyone)
    told = [exchange(_counts_in(file), part.group)[0] for file, part in zip(files, parts, strict=True)]
    known = head_step if head_step is not None else max((step for step, _ in told if step is not None), default=None)
    step = raise_together(lambda: check_step(optimizer, known), everyone)
    moments: dict[FlatParam, dict[str, Tensor]] = {flat: {} for flat in optimizer.sharded.flat_params}
    for part, file in zip(parts, files, strict=True):
        for buffer in part.buffers:
            _scatter(optimizer, buffer, part.group, file, moments)
    install_state(optimizer, moments, step)
    optimizer.sharded.num_skipped = max((num_skipped for _, num_skipped in told), default=0)


def _parts(optimizer: BuiltOptimizer, filename: str) -> list[_Part]:
    by_group: dict[Group, list[GradBuffer]] = {}
    for buffer in optimizer.grad_buffers:
        by_group.setdefault(buffer.plan.group, []).append(buffer)
    return [
        _Part(
            filename if group == optimizer.start.data else experts_filename(filename, group.global_rank(0)),
            group,
            tuple(buffers),
        )
        for group, buffers in by_group.items()
    ]


def _gather(optimizer: BuiltOptimizer, buffer: GradBuffer, group: Group, facts: Facts) -> dict[str, Tensor]:
    """1-D on the CPU, by kind; empty on all ranks but the first."""
    keys = {key for dtypes in facts.keys.values() for key in dtypes} - {MAIN}
    moments = moments_in_file(keys, is_adam=optimizer.sharded.plan.choice.is_adam)
    carrier, found = _carrier(group, buffer), {}
    for key in (MAIN, *moments):
        whole = gather_to_first(part_in_file(optimizer, buffer, key, facts, carrier.device), carrier.group)
        if whole is not None:
            found[key] = whole.cpu()
    return found


def _scatter(
    optimizer: BuiltOptimizer,
    buffer: GradBuffer,
    group: Group,
    file: GatheredFile | None,
    moments: Mapping[FlatParam, dict[str, Tensor]],
) -> None:
    tensors = None if file is None else _tensors_of(buffer, file)
    keys = exchange(tuple(tensors) if tensors is not None else (), group)[0]
    carrier, files = _carrier(group, buffer), buffer.plan.file_layout
    flats = dict.fromkeys(flat for flat, _ in owned_in(optimizer, buffer.plan))
    for key in keys:
        whole = None if tensors is None else _padded(tensors[key], buffer).to(carrier.device)
        part = torch.zeros(files.shard_numel, dtype=torch.float32, device=carrier.device)
        scatter_from_first(whole, part, carrier.group)
        into = {flat: flat.main if key == MAIN else moments[flat].setdefault(key, flat.zeros()) for flat in flats}
        take_part(optimizer, buffer, part, into)


def _padded(tensor: Tensor, buffer: GradBuffer) -> Tensor:
    """With zeros as padding for this number of ranks."""
    plan = buffer.plan
    whole = torch.zeros(plan.file_layout.numel, dtype=torch.float32)
    whole[: plan.file_numel] = tensor[: plan.file_numel]
    return whole


def _read(optimizer: BuiltOptimizer, part: _Part) -> GatheredFile | None:
    """On the first rank of the part's group, checked; None elsewhere."""
    if part.group.rank != 0:
        return None
    what = f"optimizer file {part.filename}"
    file = open_gathered(part.filename, Origin(what, _REMEDY))
    is_adam = optimizer.sharded.plan.choice.is_adam
    for buffer in part.buffers:
        moments = _tensors_of(buffer, file).keys() - {MAIN}
        # Adam's are there even before the first step, so a file without them has lost them.
        check_moments(optimizer, what, moments, may_be_none=not is_adam)
        file.check_order(is_mixed=_mixes_dtypes(optimizer, buffer), remedy=_PERMUTED)
    return file


def _tensors_of(buffer: GradBuffer, file: GatheredFile) -> dict[str, Tensor]:
    return file.tensors(buffer.plan.chunk, buffer.plan.dtype, buffer.plan.file_numel)


def _mixes_dtypes(optimizer: BuiltOptimizer, buffer: GradBuffer) -> bool:
    names = [{name for name in group.names if buffer.holds(name)} for group in optimizer.sharded.plan.groups]
    return any(
        len([sharded for sharded in buffer.sharded if any(sharded.holds(name) for name in group)]) > 1
        for group in names
    )


def _counts_in(file: GatheredFile | None) -> tuple[int | None, int]:
    """Updates, where they are counted, and steps that were skipped."""
    return (None, 0) if file is None else (file.step, file.num_skipped)


@dataclass(frozen=True)
class _Carrier:
    """Who moves the parts of a file, and where they have to be for that."""

    group: Group
    device: torch.device


def _carrier(group: Group, buffer: GradBuffer) -> _Carrier:
    """The group itself, or the fork's gloo group of the same ranks, which needs no memory on the device."""
    cpu = torch.device("cpu")
    if "gloo" in group.backend or group.size == 1:
        return _Carrier(group, cpu)
    gloo = getattr(mpu, "get_data_parallel_group_gloo", None)
    if gloo is not None and group == Group.of(mpu.get_data_parallel_group()):
        return _Carrier(Group.of(gloo()), cpu)
    return _Carrier(group, buffer.grad.device)
