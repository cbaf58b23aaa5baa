"""Main params: the flat tensors that the inner optimizer updates (see [Note: flat main params] in
layout/shards.py).

A 16-bit param has an fp32 main param of its own on the rank that owns it. An fp32 param *is* its
own main param: the view of the param buffer is updated in place, so it is never rounded and nothing
is copied.

[Note: in phase] A flat param begins wherever a host's layout puts it, but a GPU reads 128 bits at a
time only from addresses that are divisible by 16. If main param, moments, gradient and model param
all begin the same number of elements after such an address, they all reach an aligned address after
the same few elements. Then one kernel can move all of them in full vectors. Model param and
gradient have the same place in their buffers, and the other tensors are allocated to match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer, view_of
from megatron_distopt.device import pinned
from megatron_distopt.layout import FlatParamPlan, ParamShard, Span, owned_shards, plan_flat_params
from megatron_distopt.layout.buckets import VECTOR_NUMEL
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    FULL,
    LowPrecisionTensor,
    Precision,
    part_of,
    stored_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import (
    RemainderValues,
    phase_of,
    zeros_in_phase,
)

#: The fp32 gradient of each flat param of one optimizer, 1-D, see `main_grads`; None for a flat
#: param that is not updated.
MainGrads = Sequence[Tensor | None]


@dataclass(frozen=True)
class ParamGroup:
    """A param group of `torch.optim` with names in place of tensors."""

    # everything except "params": lr, weight_decay and other options of the host
    options: Mapping[str, Any]
    names: tuple[str, ...]  # of its params on this rank; may be empty


@dataclass(frozen=True)
class FlatParamKey:
    """What the params of one flat param have in common."""

    group: int  # index of the param group
    # whether another rank that has the same params adds them to the gradient statistics
    excluded_from_norm: bool
    param: str = ""  # name of its only param, if each param has a main param of its own


@dataclass(eq=False)
class OnHost:
    """Pinned tensors of a flat param whose main param is in CPU memory; see offload.py."""

    # pinned, 1-D; the main param is rounded into it and then copied to the model param
    model: Tensor
    arrived: Tensor  # pinned, fp32 1-D; the gradient is copied into it

    def part(self, span: Span) -> OnHost:
        """Views of some of the elements."""
        return OnHost(self.model[span.as_slice()], self.arrived[span.as_slice()])


@dataclass(frozen=True, eq=False)
class FlatParam:
    """One flat main param with the model params and grads of the same elements."""

    plan: FlatParamPlan[FlatParamKey]  # its elements and what they have in common
    main: Tensor  # fp32 1-D [plan.in_buffer.numel]; the inner optimizer's param
    model: Tensor  # 1-D, the same elements of the param buffer
    grad: Tensor  # 1-D, the same elements of the grad buffer
    # if the main param is in CPU memory and the model param on a device; None otherwise
    on_host: OnHost | None = None
    # fp32 1-D, the average of `main`, on the same device; None in a run without averages
    average: Tensor | None = None

    @property
    def owns_memory(self) -> bool:
        """False if `main` is the model param itself."""
        return self.model.dtype != torch.float32

    def cut(self, tensor: Tensor, shard: ParamShard) -> Tensor:
        """The elements of one of its param shards, cut from a tensor as long as the flat param."""
        return tensor[self.plan.in_flat_param(shard).as_slice()]

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros for state that is kept for every element: in phase with `main`, and of its dtype
        unless one is given."""
        phase = _phase(self.main)  # see [Note: in phase]
        if phase == 0:
            return torch.zeros_like(self.main, dtype=dtype)
        kind = dtype or self.main.dtype
        return zeros_in_phase(self.main.numel(), phase, kind, self.main.device)

    def write_model(self) -> None:
        """Rounds `main` into the param buffer."""
        if self.on_host is not None:
            self.model.copy_(self.on_host.model.copy_(self.main))
        elif self.owns_memory:
            self.model.copy_(self.main)

    def differs_from_model(self) -> bool:
        """Whether `main` does not round to the model param."""
        if not self.owns_memory:
            return False
        rounded = self.main.to(self.model.dtype)
        return not torch.equal(rounded, self.model.to(rounded.device))

    @property
    def changes_with_model(self) -> bool:
        """Whether the main param is stored as a remainder of the model param, so that a change of
        the model param changes both. Not while it is held in fp32."""
        stored = stored_of(self.main)
        return isinstance(stored, RemainderValues) and stored.held is None

    @property
    def can_tell_changes(self) -> bool:
        """Whether a comparison can find out that other code has changed the model param."""
        stored = stored_of(self.main)
        if not isinstance(stored, RemainderValues) or stored.held is not None:
            return True
        return not bool(stored.low.any())

    def read_model(self) -> None:
        """Copies the model param into `main`."""
        if self.owns_memory:
            self.main.copy_(self.model)

    def follow_model(self, shard: ParamShard) -> None:
        """Copies those elements of one param shard into `main` to which it no longer rounds.

        The other elements keep the bits below the model's precision, as if the user had changed
        fp32 weights.
        """
        if self.owns_memory:
            main = self.cut(self.main, shard)
            model = self.cut(self.model, shard).to(main.device)
            is_known = main.to(model.dtype) == model
            main.copy_(torch.where(is_known, main, model.to(main.dtype)))


def build_flat_params(
    buffers: Sequence[ShardedBuffer],
    key_of: Callable[[str], FlatParamKey | None],
    precision: Precision = FULL,
    on_host: Sequence[Collection[int]] = (),
) -> tuple[FlatParam, ...]:
    """The main params of this rank, in buffer order.

    Args:
        buffers: all on one device.
        key_of: takes a param's name; returns None for a param that is not updated.
        precision: the precision of the main params of 16-bit params.
        on_host: by buffer, the buckets whose main params are in CPU memory; empty for none.
    """
    flat_params: list[FlatParam] = []
    for number, buffer in enumerate(buffers):
        held = [slot.name for slot in buffer.layout.slots if buffer.holds(slot.name)]
        keys = {name: key_of(name) for name in held}
        plans = plan_flat_params(owned_shards(buffer.layout, buffer.rank), keys.get)
        models = [buffer.param_of(plan.in_buffer) for plan in plans]
        hosts = _on_host(plans, models, on_host[number] if on_host else ())
        are_apart = any(plan.key.param for plan in plans)
        mains = models
        if buffer.param.dtype != torch.float32:
            mains = _mains_by_place(models, hosts, precision, are_apart=are_apart)
        grads = [view_of(buffer.grad, plan.in_buffer) for plan in plans]
        flat_params += [
            FlatParam(*parts) for parts in zip(plans, mains, models, grads, hosts, strict=True)
        ]
    return tuple(flat_params)


def by_group(flat_params: Iterable[FlatParam]) -> Mapping[int, list[FlatParam]]:
    """The flat params of each param group, by its number."""
    members = defaultdict[int, list[FlatParam]](list)
    for flat in flat_params:
        members[flat.plan.key.group].append(flat)
    return members


def _on_host(
    plans: Sequence[FlatParamPlan[FlatParamKey]], models: Sequence[Tensor], buckets: Collection[int]
) -> list[OnHost | None]:
    """The pinned tensors of the flat params in the buckets, with the values of the model params;
    None for other flat params.

    The tensors of a bucket share one allocation in buffer order, so that neighbours can be copied
    at once.
    """
    hosts: list[OnHost | None] = [None] * len(plans)
    for bucket, members in groupby(range(len(plans)), key=lambda index: plans[index].bucket):
        if bucket in buckets:
            chosen = list(members)
            model = models[chosen[0]]
            first = plans[chosen[0]].in_buffer
            last = plans[chosen[-1]].in_buffer
            whole = Span(first.start, last.stop)
            rounded = pinned([whole.numel], model.dtype, model.device)
            both = OnHost(rounded, pinned([whole.numel], torch.float32, model.device))
            for index in chosen:
                part = both.part(plans[index].in_buffer.relative_to(whole.start))
                part.model.copy_(models[index])
                hosts[index] = part
    return hosts


def _mains_by_place(
    models: Sequence[Tensor],
    hosts: Sequence[OnHost | None],
    precision: Precision,
    *,
    are_apart: bool,
) -> list[Tensor]:
    """Main params with the values of their model params: fp32 in CPU memory, and in the form of
    `precision` on the device."""
    here = [model for model, host in zip(models, hosts, strict=True) if host is None]
    is_full = precision.main_params_dtype == FULL.main_params_dtype
    copies = _copy_apart if are_apart else _copy_flat
    on_device = iter(copies(here) if is_full else map(precision.main, here))
    on_host = iter(copies([host.model for host in hosts if host is not None]))
    return [next(on_device if host is None else on_host) for host in hosts]


def split_flat_param(flat: FlatParam, key_of: Callable[[str], Hashable]) -> tuple[FlatParam, ...]:
    """Cuts a flat param between neighbours with different keys. All parts are views of its
    memory."""
    members = [
        tuple(shards)
        for _, shards in groupby(flat.plan.shards, key=lambda shard: key_of(shard.name))
    ]
    if len(members) == 1:
        return (flat,)
    return tuple(_part_of(flat, shards) for shards in members)


def _part_of(flat: FlatParam, shards: tuple[ParamShard, ...]) -> FlatParam:
    in_buffer = Span(shards[0].in_buffer.start, shards[-1].in_buffer.stop)
    span = in_buffer.relative_to(flat.plan.in_buffer.start)
    part = span.as_slice()
    return FlatParam(
        plan=FlatParamPlan(flat.plan.key, flat.plan.bucket, in_buffer, shards),
        main=part_of(flat.main.detach(), span),
        model=flat.model[part],
        grad=flat.grad[part],
        on_host=None if flat.on_host is None else flat.on_host.part(span),
        average=None if flat.average is None else flat.average[part],
    )


def main_grads(flat_params: Sequence[FlatParam]) -> list[Tensor]:
    """The fp32 gradients of flat params, 1-D, on the device of the buffer: views of the grad
    buffer, or copies of 16-bit gradients.

    The copies are in one allocation, at the same places in every step.
    """
    narrow = [flat for flat in flat_params if flat.grad.dtype != torch.float32]
    if not narrow:
        return [flat.grad for flat in flat_params]
    beside = [flat.main if flat.on_host is None else flat.model for flat in narrow]
    copies = _copy_flat([flat.grad for flat in narrow], beside)
    copy_of = dict(zip(narrow, copies, strict=True))
    return [copy_of.get(flat, flat.grad) for flat in flat_params]


def _copy_flat(tensors: Sequence[Tensor], beside: Sequence[Tensor] | None = None) -> list[Tensor]:
    """fp32 copies of tensors of one device in one allocation. Each is in phase with its original,
    or with the tensor in `beside`."""
    spans, stop = [], 0
    for tensor, other in zip(tensors, tensors if beside is None else beside, strict=True):
        start = stop + (_phase(other) - stop) % VECTOR_NUMEL
        stop = start + tensor.numel()
        spans.append(Span(start, stop))
    if not spans:
        return []
    flat = torch.empty(stop, dtype=torch.float32, device=tensors[0].device)
    copies = [flat[span.as_slice()].detach() for span in spans]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _copy_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """fp32 copies, each in memory of its own, so that one can be freed without the others."""
    return [tensor.to(torch.float32, copy=True) for tensor in tensors]


def _phase(tensor: Tensor) -> int:
    """How many elements after the beginning of a vector of `VECTOR_NUMEL` elements it begins."""
    if isinstance(tensor, LowPrecisionTensor):
        return phase_of(tensor.stored) % VECTOR_NUMEL
    return tensor.data_ptr() // tensor.element_size() % VECTOR_NUMEL
