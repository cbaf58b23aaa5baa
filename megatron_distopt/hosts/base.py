"""What every host does before it builds the sharded optimizer: name the params, check them, compare ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.nn import Module, Parameter

from megatron_distopt.buffers import SUPPORTED_DTYPES, dtype_name
from megatron_distopt.comm import Field, Group, compare, exchange
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.layout import BufferLayout, ParamSpec
from megatron_distopt.optimizer import ParamGroup
from megatron_distopt.version import VERSION

__all__ = [
    "check_dtypes",
    "check_groups_are_used",
    "compare_ranks",
    "named_trainable",
    "plan_groups",
    "spec_of",
]


def named_trainable(chunks: Sequence[Module]) -> dict[str, Parameter]:
    """Every trainable param of the model once, by name; of several chunks with the chunk's number in front."""
    name_of: dict[Parameter, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                name_of.setdefault(param, prefix + name)  # one that two chunks share is one param
    return {name: param for param, name in name_of.items()}


def spec_of(name: str, param: Parameter) -> ParamSpec:
    """The param without its tensor."""
    return ParamSpec(name, param.numel(), tuple(param.shape), dtype_name(param.dtype))


def check_dtypes(named: Mapping[str, Parameter], config: DistOptConfig) -> None:
    """Refuses dtypes that the optimizer cannot update, and fp16 without a loss scale.

    Raises:
        LayoutError, ConfigError
    """
    supported = ", ".join(dtype_name(dtype) for dtype in SUPPORTED_DTYPES)
    for name, param in named.items():
        if param.dtype not in SUPPORTED_DTYPES:
            got, remedy = dtype_name(param.dtype), "Convert or freeze the param"
            raise LayoutError(refusal(f"dtype of param {name!r}", got, f"be one of {supported}", remedy))
    has_fp16 = any(param.dtype is torch.float16 for param in named.values())
    if has_fp16 and config.loss_scale is None:
        remedy = "Write loss_scale='dynamic'"
        raise ConfigError(refusal("loss_scale", "None with fp16 params", "be a number or 'dynamic'", remedy))


def plan_groups(named: Mapping[str, Parameter], torch_groups: Sequence[Mapping[str, Any]]) -> tuple[ParamGroup, ...]:
    """Param groups with names in place of params, each param in exactly one.

    Args:
        named: all params that lie in a buffer.
        torch_groups: as for `torch.optim`; all other keys are kept.

    Raises:
        LayoutError: a param in no group, in two groups, or in no buffer.
    """
    name_of = {param: name for name, param in named.items()}
    groups = []
    for index, group in enumerate(torch_groups):
        unknown = sum(param not in name_of for param in group["params"])
        if unknown:
            rule, remedy = "hold only trainable params of the model's buffers", "Leave out frozen and foreign params"
            raise LayoutError(refusal(f"param group {index}", f"{unknown} params in no buffer", rule, remedy))
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(ParamGroup(options, tuple(name_of[param] for param in group["params"])))
    _check_membership(named, groups)
    return tuple(groups)


def _check_membership(named: Mapping[str, Parameter], groups: Sequence[ParamGroup]) -> None:
    times = Counter(name for group in groups for name in group.names)
    for name in named:
        if times[name] != 1:
            got = f"in {times[name]} param groups"
            raise LayoutError(
                refusal(f"param {name!r}", got, "be in exactly 1", "Give every trainable param one group")
            )


def check_groups_are_used(groups: Sequence[ParamGroup], group: Group) -> None:
    """Collective: every param group must have a param on some rank.

    Raises:
        LayoutError: on all ranks.
    """
    counts = exchange([len(param_group.names) for param_group in groups], group)
    # A rank that has no group at all counts as one with empty groups.
    for index, column in enumerate(zip_longest(*counts, fillvalue=0)):
        if not any(column):
            got, remedy = f"no params on any of {group.size} ranks", "Leave the group out"
            raise LayoutError(refusal(f"param group {index}", got, "have a param on at least 1 rank", remedy))


def compare_ranks(
    config: DistOptConfig,
    named: Mapping[str, Parameter],
    layouts: Sequence[BufferLayout],
    *,
    data: Group,
    everyone: Group,
) -> None:
    """Collective: package version and options over all ranks, params and layout over the data-parallel group.

    Raises:
        RanksDisagreeError: on all ranks that see the difference.
    """
    compare([Field("package version", (VERSION,)), Field("options", config.described())], everyone)
    specs = [spec_of(name, param) for name, param in named.items()]
    compare(
        [
            Field("param names", tuple(spec.name for spec in specs)),
            Field("param shapes", tuple(f"{spec.name}{list(spec.shape)}" for spec in specs)),
            Field("param dtypes", tuple(f"{spec.name} {spec.dtype}" for spec in specs)),
            Field("buffer layout", tuple(str(slot) for layout in layouts for slot in layout.slots)),
        ],
        data,
    )
