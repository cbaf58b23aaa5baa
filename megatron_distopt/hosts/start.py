"""What every host does before it builds the sharded optimizer: name the params, check them, try the
collectives, and compare ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.buffers import SUPPORTED_DTYPES, dtype_name
from megatron_distopt.comm import Field, Group, all_gather_objects, compare, raise_together
from megatron_distopt.comm.collectives import Reduction, check_debug_level
from megatron_distopt.comm.group_nodes import allow_shared_memory
from megatron_distopt.comm.trial import try_collectives
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, LayoutError
from megatron_distopt.layout import BufferLayout, ParamSpec
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.inner_options import option_text
from megatron_distopt.optimizer.sharded import StepPlan
from megatron_distopt.version import VERSION


def named_params(chunks: Sequence[Module]) -> dict[str, Parameter]:
    """Every param of the model once, by name. With several chunks, the name begins with the chunk's
    number."""
    name_of: dict[Parameter, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            name_of.setdefault(param, prefix + name)  # one that two chunks share is one param
    return {name: param for param, name in name_of.items()}


def clear_grads(params: Iterable[Parameter | Tensor], *, set_to_none: bool) -> None:
    """Drops the gradients, or zeroes those that are there."""
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()


def spec_of(name: str, param: Parameter) -> ParamSpec:
    return ParamSpec(name, param.numel(), tuple(param.shape), dtype_name(param.dtype))


def check_dtypes(named: Mapping[str, Parameter], config: DistOptConfig) -> None:
    """Refuses dtypes that the optimizer cannot update, fp16 without a loss scale, and options that
    exclude each other."""
    supported = ", ".join(dtype_name(dtype) for dtype in SUPPORTED_DTYPES)
    for name, param in named.items():
        if param.dtype not in SUPPORTED_DTYPES:
            raise LayoutError(
                f"The dtype of param {name!r} is {dtype_name(param.dtype)}, but it must be one of "
                f"{supported}. Convert the model with model.float(), or freeze the param with "
                "param.requires_grad_(False)."
            )
    has_fp16 = any(param.dtype is torch.float16 for param in named.values())
    check_compatible(config, {Feature.FP16_PARAMS: "a model with fp16 params"} if has_fp16 else {})


def check_bucket_size(config: DistOptConfig, num_ranks: int, write: str) -> None:
    """Refuses a bucket size below `num_ranks`, because each rank owns at least one element of a
    bucket; `write` is an example of a good option."""
    if config.bucket_size is not None and config.bucket_size < num_ranks:
        raise ConfigError(
            f"bucket_size is {config.bucket_size}, but a bucket needs at least one element for "
            f"each of the {num_ranks} data-parallel ranks. Write {write}, or leave it out."
        )


def reduction_of(
    config: DistOptConfig, grad_dtypes: Iterable[torch.dtype], divide_by: int = 1
) -> Reduction:
    """How grads are communicated. Refuses `reduce_dtype` for 16-bit grads, which it would round
    once more."""
    if config.reduce_dtype is None:
        return Reduction(divide_by)
    short = [dtype for dtype in grad_dtypes if dtype is not torch.float32]
    if short:
        check_compatible(
            config, {Feature.SHORT_GRADS: f"keeping gradients in {dtype_name(short[0])}"}
        )
    return Reduction(divide_by, getattr(torch, config.reduce_dtype))


def begin_communication(
    config: DistOptConfig,
    how: Reduction,
    device: torch.device,
    everyone: Group,
    groups: Sequence[Group],
    dtypes: Iterable[torch.dtype],
) -> None:
    """Collective: tries the collectives that training will use. `groups` reduce grads, that of
    dense params first; `dtypes` are those of grads and params."""
    for group in dict.fromkeys(groups):
        allow_shared_memory(group, config.shared_memory)
    # In the same order on all ranks, even if they hold different params.
    known = sorted(
        {dtype for each in all_gather_objects(list(dtypes), everyone) for dtype in each}, key=str
    )
    raise_together(lambda: try_collectives(device, groups[0], how, dtypes=known), everyone)
    if config.overlap_grad_reduce or config.overlap_param_gather:
        raise_together(lambda: check_debug_level(device, groups[0], how), everyone)
    try_statistics(device, everyone)


def try_statistics(device: torch.device, everyone: Group) -> None:
    """Collective: tries the sums with which ranks compute the gradient norm and compare each
    other."""
    raise_together(
        lambda: try_collectives(device, everyone, sums=(stats_dtype(device), torch.float32)),
        everyone,
    )


def as_torch_groups(param_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups in any form that `torch.optim` takes, as dicts with a list of params."""
    groups = []
    for given in param_groups:
        if not isinstance(given, Mapping):
            raise _no_groups(f"contains a {type(given).__name__}")
        if "params" not in given:
            raise _no_groups("contains a dict without 'params'")
        params = given["params"]
        of_group = [params] if isinstance(params, Tensor) else list(params)
        groups.append({**given, "params": of_group})
    if not groups:
        raise _no_groups("is empty")
    return groups


def _no_groups(found: str) -> LayoutError:
    return LayoutError(
        f"param_groups {found}, but it must be a list of dicts that have 'params'. Write "
        "[{'params': [...], 'weight_decay': 0.0}, ...]."
    )


def compare_ranks(
    named: Mapping[str, Parameter],
    plan: StepPlan,
    buffers: Sequence[tuple[BufferLayout, torch.dtype]],
    data: Group,
    *,
    host_options: tuple[str, ...] = (),
    may_be_empty: bool = False,
) -> None:
    """Collective: compares everything that must be equal on all ranks. A difference in one
    data-parallel group stops all ranks.

    `host_options` are options of the host that decide what is communicated when; `may_be_empty`
    allows groups without trained params.
    """
    everyone = plan.stats_group()
    counts = (
        []
        if may_be_empty
        else all_gather_objects([len(group.names) for group in plan.groups], everyone)
    )
    # A rank that has no group at all counts as one with empty groups.
    for index, column in enumerate(zip_longest(*counts, fillvalue=0)):
        if not any(column):
            raise LayoutError(
                f"Param group {index} has no params on any of the {everyone.size} ranks. Leave the "
                "group out."
            )
    of_all = [
        Field("package version", (VERSION,)),
        Field("options", plan.config.described()),
        Field("host options", host_options),
    ]
    compare(of_all, everyone)
    specs = [spec_of(name, param) for name, param in named.items()]
    groups: list[str] = []
    members: list[str] = []
    for index, group in enumerate(plan.groups):
        pairs = [f"{key}={option_text(value)}" for key, value in sorted(group.options.items())]
        groups.append(f"group {index}: {', '.join(pairs)}")
        members += [f"{name} in {index}" for name in group.names]
    layout: list[str] = []
    for buffer, dtype in buffers:
        layout.append(f"{buffer.num_shards} shards of {dtype_name(dtype)} grads")
        layout += map(str, buffer.buckets)
        layout += map(str, buffer.slots)
    of_data_parallel: dict[str, Iterable[str]] = {
        "param names": [spec.name for spec in specs],
        "param shapes": [f"{spec.name}{list(spec.shape)}" for spec in specs],
        "param dtypes": [f"{spec.name} {spec.dtype}" for spec in specs],
        "param groups": groups,
        "param group members": members,
        "params excluded from the norm": filter(plan.excluded_from_norm, named),
        "inner optimizer": (plan.choice.name, *plan.choice.defaults),
        "buffer layout": layout,
    }
    fields = [Field(title, tuple(values)) for title, values in of_data_parallel.items()]
    raise_together(lambda: compare(fields, data), everyone)
