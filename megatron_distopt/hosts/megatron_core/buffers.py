"""The buffers of megatron-core's DistributedDataParallel as `ShardedBuffer`.

The host's layout is adopted as it is, because the host's own collectives (reduce-scatter in
backward, all-gather in forward) keep using it.

[Note: buffers that move] Frameworks that generate between steps, such as ROLL, give a buffer other
memory (`buffer.param_data.data = ...`) and cut params, gradients and buckets from it again. The
views in flat params have to follow at once. Otherwise they would keep the old memory alive, and the
next step would read old gradients. So the two tensors of a buffer become a `FollowedBuffer`, whose
views follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import BufferLayout, ParamSlot, Span, adopt
from megatron_distopt.optimizer.main_params import FlatParam


def adopt_buffer(buffer: Any, name_of: Mapping[Parameter, str]) -> ShardedBuffer:
    """Adopts one `_ParamAndGradBuffer` of the host, with its `param_index_map`
    {param: (start, stop, bucket)}, its `buckets` and its memory."""
    rank = buffer.data_parallel_group.rank()
    return ShardedBuffer(layout_of(buffer, name_of), rank, buffer.grad_data, buffer.param_data)


def chunks_of(optimizers: Iterable[Any]) -> list[Any]:
    """The chunks that hold the buffers of these optimizers of the host, each once."""
    chunks = (chunk for optimizer in optimizers for chunk in optimizer.model_chunks)
    return list(dict.fromkeys(chunks))


def groups_by_name(
    named: Mapping[str, Parameter], buffers: Iterable[Any]
) -> Callable[[str], Group]:
    """Returns a function from a param's name to the ranks over which the host shards it."""
    group_of = {param: buffer.data_parallel_group for buffer in buffers for param in buffer.params}
    return lambda name: Group.of(group_of[named[name]])


def layout_of(buffer: Any, name_of: Mapping[Parameter, str]) -> BufferLayout:
    """The layout of one `_ParamAndGradBuffer`. Refuses a layout that cannot be adopted."""
    for param, (start, _, bucket) in buffer.param_index_map.items():
        first = buffer.buckets[bucket].offset
        if start < first:
            raise LayoutError(
                f"Param {name_of[param]!r} lies at {start}, before its bucket, which begins at "
                f"{first}. megatron-core before 0.13 misplaces an embedding that pipeline stages "
                "share. Write --untie-embeddings-and-output-weights, or use megatron-core 0.13 or "
                "later."
            )
    slots = [
        ParamSlot(name_of[param], bucket, Span(start, stop))
        for param, (start, stop, bucket) in buffer.param_index_map.items()
    ]
    spans = [Span(0, bucket.grad_data.numel()).moved_by(bucket.offset) for bucket in buffer.buckets]
    # The host's layer-wise layout has gaps between params, which its numel_unpadded leaves out.
    stops = {
        bucket: stop
        for _, stop, bucket in sorted(buffer.param_index_map.values(), key=lambda entry: entry[1])
    }
    used = [stops[number] - bucket.offset for number, bucket in enumerate(buffer.buckets)]
    numel_unpadded = [
        max(bucket.numel_unpadded, numel)
        for bucket, numel in zip(buffer.buckets, used, strict=True)
    ]
    num_shards = buffer.data_parallel_group.size()
    return adopt(slots, spans, num_shards=num_shards, numel_unpadded=numel_unpadded)


class FollowedBuffer(Tensor):
    """A 1-D param or grad buffer of the host, whose views follow it to other memory; see [Note:
    buffers that move]."""

    _views: Sequence[tuple[Tensor, slice]]  # each with the elements that it shows
    _moved: Callable[[], None]
    is_back = True  # whether it has its elements, and is not emptied
    has_moved = False

    # Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, buffer: Tensor, views: Sequence[tuple[Tensor, slice]], moved: Callable[[], None]
    ) -> FollowedBuffer:
        """A FollowedBuffer in the memory of `buffer`, which calls `moved` when it gets other
        memory."""
        made: FollowedBuffer = Tensor._make_subclass(cls, buffer.detach())
        made._views, made._moved = views, moved
        return made

    @property
    def data(self) -> Tensor:
        """The buffer as a plain tensor. While other code has assigned a tensor of another shape or
        dtype, to empty the buffer, its views are empty."""
        buffer: Tensor = _torchs_data.__get__(self)
        return buffer.as_subclass(Tensor)

    @data.setter
    def data(self, new: Tensor) -> None:
        usual, numel = self._views[0][0].dtype, self._views[0][1].stop
        self.is_back, self.has_moved = new.shape == (numel,) and new.dtype == usual, True
        _torchs_data.__set__(self, new)
        for view, elements in self._views:
            view.data = (
                new[elements] if self.is_back else torch.empty(0, dtype=usual, device=new.device)
            )
        self._moved()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return deepcopy(self.data, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tensor.__reduce_ex__(self.data, protocol)  # type: ignore[no-untyped-call, unused-ignore]


_torchs_data: Any = Tensor.data


def follow_buffers(
    buffers: Sequence[Any],
    adopted: Sequence[ShardedBuffer],
    flat_params: Sequence[FlatParam],
    chunks: Sequence[Any],
) -> None:
    """Makes flat params follow the buffers of the host in which they lie."""
    for buffer, ours in zip(buffers, adopted, strict=True):
        address = ours.param.data_ptr()
        members = [
            flat for flat in flat_params if flat.model.untyped_storage().data_ptr() == address
        ]
        spans = [
            slice(0, ours.param.numel()),
            *(flat.plan.in_buffer.as_slice() for flat in members),
        ]
        for name, views in (
            ("param_data", [ours.param, *(flat.model for flat in members)]),
            ("grad_data", [ours.grad, *(flat.grad for flat in members)]),
        ):
            shown = list(zip(views, spans, strict=True))
            setattr(
                buffer, name, FollowedBuffer.of(views[0], shown, partial(_forget_shards, chunks))
            )


def _forget_shards(chunks: Sequence[Any]) -> None:
    """Drops the views of shards that the host has cached for its collectives."""
    for group in (
        each
        for chunk in chunks
        for each in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ):
        for name in ("cached_param_buffer_shard_list", "cached_grad_buffer_shard_list"):
            if hasattr(group, name):  # from 0.12 on
                setattr(group, name, [None] * len(group.buckets))


def check_are_in(buffer: Any, named: Mapping[str, Parameter]) -> None:
    """Refuses an emptied buffer of the host, and params and buckets that are not in their place in
    a buffer.

    An update is written to the buffer, so such a param would never change again; see [Note: params
    that have left]. If a grad buffer has moved, the gradients of params are checked as well, except
    those to which the host has given memory of their own.
    """
    for kind, whole in (("param", buffer.param_data), ("grad", buffer.grad_data)):
        if not whole.is_back:
            raise LayoutError(
                f"A {kind} buffer was emptied (buffer.{kind}_data.data = ...). Before the step, "
                "call buffer.reload_from_cpu() or your framework's call that loads it again."
            )
        first, nbytes = whole.data_ptr(), whole.element_size()
        for number, bucket in enumerate(buffer.buckets):
            if getattr(bucket, f"{kind}_data").data_ptr() != first + bucket.offset * nbytes:
                raise LayoutError(
                    f"A {kind} buffer was given other memory (buffer.data = ...), but its bucket "
                    f"{number} still has the old memory. Cut bucket.{kind}_data, params and "
                    "main_grads from the buffer again."
                )
        if kind == "param" or whole.has_moved:
            _check_params_are_in(buffer, kind, whole, named)


def _check_params_are_in(
    buffer: Any, kind: str, whole: Tensor, named: Mapping[str, Parameter]
) -> None:
    where, own = "param.data", set[Parameter]()
    if kind == "grad":
        where = "param.main_grad"
        own = {
            param
            for each in buffer.buckets
            for param in getattr(each, "params_with_extra_main_grads", ())
        }
    for name, param in named.items():
        if param not in buffer.param_index_map or param in own:
            continue
        tensor = param if kind == "param" else getattr(param, "main_grad", None)
        start, *_ = buffer.param_index_map[param]
        if tensor is None or tensor.data_ptr() != whole.data_ptr() + start * whole.element_size():
            raise LayoutError(
                f"The {kind} {name!r} was given other memory ({where} = ..., or a conversion), but "
                f"it must stay in the host's {kind} buffer. Write {where}.copy_(...), or change "
                "the model before it is wrapped."
            )
