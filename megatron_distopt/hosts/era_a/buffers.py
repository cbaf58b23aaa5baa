"""The grad buffers of the fork's DistributedDataParallel, in our words.

The fork keeps one grad buffer for each grad dtype of a chunk and lets the params be. We keep its grad buffers, each as
one bucket, and give the params real param buffers. Two things do not fit into the fork's buffer and get one of their
own, to which `main_grad` is moved: params of experts, which other ranks own than the dense ones, and a buffer whose
padding fits the data-parallel size but not the group that it is sharded over (Ulysses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.buffers import ShardedBuffer, move_into_buffer, pack_params, view_of
from megatron_distopt.comm import Group
from megatron_distopt.hosts.base import spec_of
from megatron_distopt.hosts.era_a.groups import dense_group, expert_group, is_expert
from megatron_distopt.layout import BufferLayout, ParamSlot, Span, adopt, lay_out

__all__ = ["GradBuffer", "adopt_grad_buffers"]

Named = Mapping[str, Parameter]


@dataclass(frozen=True)
class GradBuffer:
    """One grad buffer with the param buffers of the params that accumulate into it.

    Args:
        chunk: number of the model chunk.
        dtype: of the grads; the fork's key.
        group: over which it is sharded.
        sharded: one for each param dtype, the majority first; all with the same grad tensor and layout.
        is_ours: the fork's DistributedDataParallel does not know this tensor, so it does not zero it.
    """

    chunk: int
    dtype: torch.dtype
    group: Group
    sharded: tuple[ShardedBuffer, ...]
    is_ours: bool = False

    @property
    def grad(self) -> Tensor:
        """1-D [layout.numel]."""
        return self.sharded[0].grad

    @property
    def layout(self) -> BufferLayout:
        """Of the grads."""
        return self.sharded[0].layout


def adopt_grad_buffers(chunks: Sequence[Module], name_of: Mapping[Parameter, str]) -> tuple[GradBuffer, ...]:
    """All grad buffers of the model, in the order in which every rank reduces them.

    Args:
        chunks: wrapped by the fork's DistributedDataParallel with contiguous buffers.
        name_of: names of all params.
    """
    return tuple(
        buffer
        for number, chunk in enumerate(chunks)
        for dtype in chunk._grad_buffers  # type: ignore[union-attr]
        for buffer in _of_one(number, chunk, dtype, name_of)
    )


def _of_one(number: int, chunk: Any, dtype: torch.dtype, name_of: Mapping[Parameter, str]) -> list[GradBuffer]:
    in_buffer = {name_of[param]: param for param in chunk._grad_buffer_param_index_map[dtype]}
    dense = {name: param for name, param in in_buffer.items() if not is_expert(param)}
    buffers = [_adopt_dense(number, chunk, dtype, name_of, dense)] if dense else []
    by_group: dict[Group, dict[str, Parameter]] = {}
    for name, param in in_buffer.items():
        if name not in dense:
            by_group.setdefault(expert_group(name, param), {})[name] = param
    return buffers + [_make_own(number, dtype, group, experts) for group, experts in by_group.items()]


def _adopt_dense(
    number: int, chunk: Any, dtype: torch.dtype, name_of: Mapping[Parameter, str], dense: Named
) -> GradBuffer:
    memory, spans = chunk._grad_buffers[dtype], chunk._grad_buffer_param_index_map[dtype]
    group = dense_group()
    slots = [ParamSlot(name_of[param], 0, Span(*span)) for param, span in spans.items()]
    numel = -(-memory.numel // group.size) * group.size
    if memory.numel_padded % group.size == 0:
        numel = memory.numel_padded
    layout = adopt(slots, [Span(0, numel)], num_shards=group.size, numel_unpadded=[memory.numel])
    if numel != memory.numel_padded:
        memory.data, memory.numel_padded = memory.data.new_zeros(numel), numel
        _point_main_grads({name_of[param]: param for param in spans}, layout, memory.data)
    return GradBuffer(number, dtype, group, _with_params(dense, layout, group, memory.data))


def _make_own(number: int, dtype: torch.dtype, group: Group, params: Named) -> GradBuffer:
    specs = [spec_of(name, param) for name, param in params.items()]
    layout = lay_out(specs, num_shards=group.size)
    grad = torch.zeros(layout.numel, dtype=dtype, device=next(iter(params.values())).device)
    _point_main_grads(params, layout, grad)
    return GradBuffer(number, dtype, group, _with_params(params, layout, group, grad), is_ours=True)


def _point_main_grads(params: Named, layout: BufferLayout, grad: Tensor) -> None:
    """The fork's hook looks `main_grad` up whenever it adds to it."""
    for name, param in params.items():
        param.main_grad = view_of(grad, layout.slot_of[name].in_buffer, param.shape)  # type: ignore[attr-defined]


def _with_params(params: Named, layout: BufferLayout, group: Group, grad: Tensor) -> tuple[ShardedBuffer, ...]:
    """See [Note: two param dtypes in one grad buffer] in buffers/compact.py."""
    by_dtype: dict[torch.dtype, dict[str, Parameter]] = {}
    for name, param in params.items():
        by_dtype.setdefault(param.dtype, {})[name] = param
    majority, *minorities = sorted(by_dtype.values(), key=_numel, reverse=True)
    first = ShardedBuffer(layout, group.rank, grad, move_into_buffer(majority, layout), frozenset(majority))
    return first, *(pack_params(minority, layout, group.rank, grad) for minority in minorities)


def _numel(params: Named) -> int:
    return sum(param.numel() for param in params.values())
