"""The grad buffers of the fork's DistributedDataParallel as layouts, and the param buffers next to
them.

The fork keeps one grad buffer for each grad dtype of a chunk and does not move the params. Its grad
buffers stay, each as one bucket, and the params move into param buffers. In three cases the fork's
buffer cannot be used, and `main_grad` moves to another buffer. Experts are sharded over other ranks
than dense params. With Ulysses, the fork's padding may fit the data-parallel size but not the group
over which the buffer is sharded. And a buffer that is cut into buckets has padding in each of them
(plan.py). The fork's index map stays, because its files have the params in that order.

Dense params are sharded over the data-parallel group. With Ulysses sequence parallelism it is the
sequence-data group, because ranks with different parts of a sequence hold the same params too.
Expert params are sharded over the ranks that hold the same experts.

[Note: used grads] After a step each rank's shard holds sums, which may be divided, and the rest of
the buffer holds only what this rank contributed. Gradients that are added to these values would be
wrong. The fork's training loop zeroes the buffers before each step. To notice when it does not, the
first and the last element of each buffer are made infinite after a step: zeroing the buffer, by
whatever call, removes the mark, and adding finite values does not. The mark is tested on the
device, and the result is sent to all ranks with the statistics of the step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.buffers import ShardedBuffer, move_into_buffer, pack_params, view_of
from megatron_distopt.comm import Group
from megatron_distopt.errors import HostError, LayoutError
from megatron_distopt.hosts.start import spec_of
from megatron_distopt.hosts.watches.watched_params import telling_of_aliases
from megatron_distopt.layout import BufferLayout, ParamSlot, Span, adopt, lay_out

#: Getters of expert data-parallel groups, newest first.
_EXPERT_GROUPS = ("get_expert_data_parallel_group", "get_data_modulo_expert_parallel_group")


def dense_group() -> Group:
    """Ranks that hold the same dense params."""
    size = getattr(mpu, "get_sequence_parallel_world_size", None)
    if size is not None and size() > 1:
        return Group.of(mpu.get_sequence_data_parallel_group())
    return Group.of(mpu.get_data_parallel_group())


def is_expert(param: Parameter) -> bool:
    """Whether DeepSpeed's or Megatron's layers have marked a param as one of an expert, which ranks
    of the dense group do not share."""
    return not getattr(param, "allreduce", True)


def expert_group(name: str, param: Parameter) -> Group:
    """Ranks that hold the same expert as `param`."""
    group_name, groups = getattr(param, "group_name", None), _groups_of_deepspeed(param)
    if groups is not None:
        return Group.of(groups._get_expert_data_parallel_group_dict()[group_name])
    for getter in _EXPERT_GROUPS:
        if hasattr(mpu, getter):
            return Group.of(getattr(mpu, getter)())
    raise HostError(
        f"No process group is known for the expert param {name!r}: its group_name "
        f"{group_name!r} is not a group of DeepSpeed's, and there is no mpu.{_EXPERT_GROUPS[0]}(). "
        "Use the MoE layer of deepspeed.moe, or add that function to mpu."
    )


def expert_place(param: Parameter) -> tuple[int, int]:
    """(rank, size) of this rank among those that hold different experts."""
    if (groups := _groups_of_deepspeed(param)) is not None:
        name: Any = param.group_name  # type: ignore[attr-defined]
        return groups._get_expert_parallel_rank(name), groups._get_expert_parallel_world_size(name)
    if hasattr(mpu, "get_expert_model_parallel_rank"):
        return mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()
    return 0, 1


def _groups_of_deepspeed(param: Parameter) -> Any:
    """DeepSpeed's module of groups, if one of its MoE layers has set a group's name on the param;
    None otherwise."""
    groups = import_module("deepspeed.utils.groups") if "deepspeed" in sys.modules else None
    known = {} if groups is None else groups._get_expert_data_parallel_group_dict()
    return groups if getattr(param, "group_name", None) in known else None


@dataclass(frozen=True)
class BufferPlan:
    """The plan for one grad buffer of the fork, or for the experts in it."""

    chunk: int  # number of the model chunk
    dtype: torch.dtype  # of the grads; the fork's key
    group: Group  # the ranks over which it is sharded
    layout: BufferLayout  # of the grads
    params: Mapping[str, Parameter]  # the params that are updated from it, by name
    # the place of each param in the fork's files, which is that in the fork's buffer
    in_file: Mapping[str, Span]
    file_numel: int  # elements in the files, without padding
    is_ours: bool = False  # unknown to the fork's DistributedDataParallel, which will not zero it

    @cached_property
    def is_in_place(self) -> bool:
        """Whether the buffer is split over ranks as in the files; the same on all ranks of the
        group."""
        layout = self.layout
        is_padded_alike = 0 <= layout.numel - self.file_numel < layout.num_shards
        in_order = all(slot.in_buffer == self.in_file[slot.name] for slot in layout.slots)
        return len(layout.buckets) == 1 and is_padded_alike and in_order

    @cached_property
    def file_layout(self) -> BufferLayout:
        """The layout of the buffer in the files: one bucket in the fork's order, with its
        padding."""
        if self.is_in_place:
            return self.layout
        slots = [ParamSlot(name, 0, span) for name, span in self.in_file.items()]
        num_shards = self.group.size
        padded = Span(0, -(-self.file_numel // num_shards) * num_shards)
        return adopt(slots, [padded], num_shards=num_shards, numel_unpadded=[self.file_numel])


@dataclass(frozen=True)
class GradBuffer:
    """One grad buffer with the param buffers of the params that accumulate into it."""

    plan: BufferPlan
    # one for each param dtype, the majority first; all with the same grad tensor and layout
    sharded: tuple[ShardedBuffer, ...]

    @property
    def grad(self) -> Tensor:
        """1-D [layout.numel]."""
        return self.sharded[0].grad


def plan_grad_buffers(
    chunks: Sequence[Any], name_of: Mapping[Parameter, str]
) -> tuple[BufferPlan, ...]:
    """All grad buffers of the wrapped chunks, in the order in which every rank reduces them. Moves
    nothing."""
    plans: list[BufferPlan] = []
    places = [
        (number, chunk, dtype)
        for number, chunk in enumerate(chunks)
        for dtype in chunk._grad_buffers
    ]
    for number, chunk, dtype in places:
        index_map = chunk._grad_buffer_param_index_map[dtype]
        spans = {name_of[param]: Span(*span) for param, span in index_map.items()}
        dense = {name_of[param]: param for param in index_map if not is_expert(param)}
        if dense:
            group, memory = dense_group(), chunk._grad_buffers[dtype]
            # The fork's padding, unless it does not divide into the group's shards.
            fits = memory.numel_padded % group.size == 0
            numel = memory.numel_padded if fits else -(-memory.numel // group.size) * group.size
            slots = [ParamSlot(name, 0, span) for name, span in spans.items()]
            layout = adopt(
                slots, [Span(0, numel)], num_shards=group.size, numel_unpadded=[memory.numel]
            )
            plans.append(BufferPlan(number, dtype, group, layout, dense, spans, memory.numel))
        by_group: dict[Group, dict[str, Parameter]] = {}
        for param in filter(is_expert, index_map):
            by_group.setdefault(expert_group(name_of[param], param), {})[name_of[param]] = param
        for group, experts in by_group.items():
            layout = lay_out([spec_of(*item) for item in experts.items()], num_shards=group.size)
            in_file = {slot.name: slot.in_buffer for slot in layout.slots}
            numel = layout.buckets[-1].numel_unpadded
            plans.append(
                BufferPlan(number, dtype, group, layout, experts, in_file, numel, is_ours=True)
            )
    return tuple(plans)


def take_over(plan: BufferPlan, chunks: Sequence[Module]) -> GradBuffer:
    """Allocates param buffers, and a grad buffer if the fork's cannot be used, and moves params and
    grads there."""
    chunk: Any = chunks[plan.chunk]
    memory = chunk._grad_buffers[plan.dtype]
    if plan.is_ours:
        grad = memory.data.new_zeros(plan.layout.numel)
    elif plan.layout.numel != memory.data.numel():
        # The fork's buffer holds nothing yet. It is freed first, because both at once would be the
        # peak of the run's memory.
        for param in plan.params.values():
            param.main_grad = None  # type: ignore[attr-defined]
        memory.data = memory.data.new_empty(0)
        memory.data = grad = memory.data.new_zeros(plan.layout.numel)
        memory.numel_padded = plan.layout.numel
    else:
        grad = memory.data
    # the fork's hook looks `main_grad` up whenever it adds to it
    for name, param in plan.params.items():
        param.main_grad = view_of(grad, plan.layout.slot_of[name].in_buffer, param.shape)  # type: ignore[attr-defined]
    # See [Note: two param dtypes in one grad buffer] in buffers/compact.py.
    by_dtype: dict[torch.dtype, dict[str, Parameter]] = {}
    for name, param in plan.params.items():
        by_dtype.setdefault(param.dtype, {})[name] = param
    by_numel = sorted(
        by_dtype.values(),
        key=lambda params: sum(each.numel() for each in params.values()),
        reverse=True,
    )
    layout, rank, (majority, *minorities) = plan.layout, plan.group.rank, by_numel
    with telling_of_aliases(plan.params):
        moved = move_into_buffer(majority, layout)
        packed = [pack_params(minority, layout, rank, grad) for minority in minorities]
    return GradBuffer(
        plan, (ShardedBuffer(layout, rank, grad, moved, frozenset(majority)), *packed)
    )


def main_grads(params: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The tensors to which the fork adds the gradients, by name."""
    return {name: param.main_grad for name, param in params.items()}  # type: ignore[attr-defined]


class UsedGrads:
    """Finds gradients that were added to used ones, see [Note: used grads]. `found` has the dtype
    and device of `like`."""

    def __init__(self, grads: Sequence[Tensor], like: Tensor) -> None:
        self._grads = [grad for grad in grads if grad.numel() > 1]
        self._nothing = like.new_zeros(1)
        #: 1-D [1], above 0 where `look` found such grads.
        self.found = self._nothing.clone()

    @torch.no_grad()
    def mark(self) -> None:
        """Marks the grads as used, after a step."""
        for grad in self._grads:
            grad[:1].fill_(math.inf)
            grad[-1:].fill_(-math.inf)

    @torch.no_grad()
    def look(self) -> None:
        """Looks for the mark before the grads of a step are reduced; the CPU does not wait."""
        used = [(grad[:1] == math.inf) & (grad[-1:] == -math.inf) for grad in self._grads]
        self.found = (
            torch.cat(used).any().to(self._nothing.dtype).view(1) if used else self._nothing.clone()
        )

    @staticmethod
    def check(found: Tensor) -> None:
        """Raises if an earlier `look` has found the mark; waits for the device."""
        if found.item() > 0:
            raise LayoutError(
                "Gradients were added to those of the step before, because the grad buffers were "
                "not zeroed. Before the first backward of every step, call zero_grad_buffer() of "
                "every model chunk and optimizer.zero_grad()."
            )
