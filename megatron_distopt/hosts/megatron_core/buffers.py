"""The buffers that megatron-core's DistributedDataParallel made, in our words.

The host's layout is adopted as it is: its own collectives (reduce-scatter in backward, all-gather in forward) go on
using it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import BufferLayout, ParamSlot, Span, adopt
from megatron_distopt.optimizer.main_params import FlatParam


def adopt_buffer(buffer: Any, name_of: Mapping[Parameter, str]) -> ShardedBuffer:
    """One `_ParamAndGradBuffer` of the host: `param_index_map` {param: (start, stop, bucket)}, `buckets` and memory."""
    rank = buffer.data_parallel_group.rank()
    return ShardedBuffer(layout_of(buffer, name_of), rank, buffer.grad_data, buffer.param_data)


def groups_by_name(named: Mapping[str, Parameter], buffers: Iterable[Any]) -> Callable[[str], Group]:
    """From the name of a param to the data-parallel ranks over which the host shards it."""
    group_of = {param: buffer.data_parallel_group for buffer in buffers for param in buffer.params}
    return lambda name: Group.of(group_of[named[name]])


def layout_of(buffer: Any, name_of: Mapping[Parameter, str]) -> BufferLayout:
    """The layout of one `_ParamAndGradBuffer`, where it can be adopted."""
    for param, (start, _, bucket) in buffer.param_index_map.items():
        first = buffer.buckets[bucket].offset
        if start < first:
            raise LayoutError(
                f"The param {name_of[param]!r} lies at {start}, before its bucket, which begins at {first}. Write "
                "--untie-embeddings-and-output-weights, or use megatron-core 0.13 or later: until then it misplaces an "
                "embedding that pipeline stages share."
            )
    slots = [
        ParamSlot(name_of[param], bucket, Span(start, stop))
        for param, (start, stop, bucket) in buffer.param_index_map.items()
    ]
    spans = [Span(0, bucket.grad_data.numel()).moved_by(bucket.offset) for bucket in buffer.buckets]
    # The host's layer-wise layout has gaps between params, and counts params alone.
    stops = {bucket: stop for _, stop, bucket in sorted(buffer.param_index_map.values(), key=lambda entry: entry[1])}
    used = [stops[number] - bucket.offset for number, bucket in enumerate(buffer.buckets)]
    numel_unpadded = [max(bucket.numel_unpadded, numel) for bucket, numel in zip(buffer.buckets, used, strict=True)]
    num_shards = buffer.data_parallel_group.size()
    return adopt(slots, spans, num_shards=num_shards, numel_unpadded=numel_unpadded)


def check_params_are_in(buffer: Any, named: Mapping[str, Parameter]) -> None:
    """Refuses params that have left their place in a buffer of the host; see [Note: params that have left].

    The host's own optimizer goes on updating the buffer, and such a param would never change again.
    """
    start_of = {param: start for param, (start, _, _) in buffer.param_index_map.items()}
    first, nbytes = buffer.param_data.data_ptr(), buffer.param_data.element_size()
    for name, param in named.items():
        if param in start_of and param.data_ptr() != first + start_of[param] * nbytes:
            found = f"The param {name!r} was given other memory (param.data = ..., or a conversion)"
            remedy = "Write param.data.copy_(...), or change the model before it is wrapped"
            raise LayoutError(f"{found}, and must stay in the host's param buffer. {remedy}.")


def check_buffers_stay(adopted: Sequence[ShardedBuffer], flat_params: Sequence[FlatParam]) -> None:
    """Refuses buffers of the host that were given other memory (`buffer.grad_data.data = ...`).

    Flat params are views of the memory before: gradients would not reach them, nor their updates the model.
    """
    for kind, buffers, views in (
        ("param", [buffer.param for buffer in adopted], [flat.model for flat in flat_params]),
        ("grad", [buffer.grad for buffer in adopted], [flat.grad for flat in flat_params]),
    ):
        live = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        if any(view.untyped_storage().data_ptr() not in live for view in views):
            remedy = "Free and fill it with storage().resize_(...), as the host's offload_grad_buffers() does"
            raise LayoutError(f"A {kind} buffer was given other memory (buffer.data = ...). {remedy}.")
