"""What every host does before it builds the sharded optimizer: name the params, check them, compare ranks.

Also here: the host's timers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_distopt.buffers import SUPPORTED_DTYPES, dtype_name
from megatron_distopt.comm import Field, Group, compare, exchange, profiled, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.layout import BufferLayout, ParamSpec
from megatron_distopt.optimizer.loss_scale import ConstantLossScale, LossScale
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.sharded import StepPlan
from megatron_distopt.version import VERSION


def with_hosts_own(options: DistOptConfig, own: Mapping[str, Any]) -> DistOptConfig:
    """`options` with those that the host decides.

    Args:
        options: ours.
        own: the host's values, by name of our option.

    Raises:
        ConfigError: code gave one of them another value.
    """
    merged = dataclasses.replace(options, **own)
    for name in own:
        given, value = getattr(options, name), getattr(merged, name)
        if name in options.explicit and given != value:
            rule = f"be the host's own {value!r}"
            remedy = f"Drop {name} from DistOptConfig(...), and give the host's flag that value"
            raise ConfigError(refusal(name, f"{given!r} in DistOptConfig(...)", rule, remedy))
    return merged


def named_params(chunks: Sequence[Module]) -> dict[str, Parameter]:
    """Every param of the model once, by name; of several chunks with the chunk's number in front."""
    name_of: dict[Parameter, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            name_of.setdefault(param, prefix + name)  # one that two chunks share is one param
    return {name: param for param, name in name_of.items()}


def named_trainable(chunks: Sequence[Module]) -> dict[str, Parameter]:
    """The same without frozen params."""
    return {name: param for name, param in named_params(chunks).items() if param.requires_grad}


def names_by_param(chunks: Sequence[Module]) -> dict[Parameter, str]:
    """Names as the bare model has them, of frozen params too: the wrappers' "module." is left out."""
    return {param: _without_wrappers(name) for name, param in named_params(chunks).items()}


def _without_wrappers(name: str) -> str:
    chunk, dot, rest = name.partition(".") if name.startswith("chunk") else ("", "", name)
    while rest.startswith("module."):
        rest = rest.removeprefix("module.")
    return f"{chunk}{dot}{rest}"


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
    check_compatible(config, {Feature.FP16_PARAMS: "a model with fp16 params"} if has_fp16 else {})


def check_bucket_size(config: DistOptConfig, num_ranks: int, write: str) -> None:
    """Checks that every rank can own an element of a bucket.

    Args:
        config: merged.
        num_ranks: that share each bucket.
        write: an example of a good one.

    Raises:
        ConfigError
    """
    if config.bucket_size is not None and config.bucket_size < num_ranks:
        got, rule = f"{config.bucket_size} elements", f"have one for each of the {num_ranks} data-parallel ranks"
        raise ConfigError(refusal("bucket_size", got, rule, f"Write {write}, or leave it out"))


def reduce_dtype_of(config: DistOptConfig, grad_dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype in which grads are communicated; None for their own.

    Raises:
        ConfigError: grads that are kept in 16 bits would be rounded.
    """
    if config.reduce_dtype is None:
        return None
    short = [dtype for dtype in grad_dtypes if dtype is not torch.float32]
    if short:
        check_compatible(config, {Feature.SHORT_GRADS: f"keeping gradients in {dtype_name(short[0])}"})
    reduce_dtype: torch.dtype = getattr(torch, config.reduce_dtype)
    return reduce_dtype


def as_torch_groups(param_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups in every form that `torch.optim` takes, as dicts with a list of params.

    Raises:
        LayoutError: something that is no param group.
    """
    param_groups = list(param_groups)
    wrong = [group for group in param_groups if not (isinstance(group, Mapping) and "params" in group)]
    if wrong or not param_groups:
        got = f"a list with {_kind(wrong[0])}" if wrong else "an empty list"
        rule = "be a list of dicts with 'params', as for torch.optim"
        raise LayoutError(refusal("param_groups", got, rule, "Write [{'params': [...], 'weight_decay': 0.0}, ...]"))
    groups = [dict(group) for group in param_groups]
    for group in groups:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    return groups


def _kind(group: object) -> str:
    return "a dict without 'params'" if isinstance(group, Mapping) else f"a {type(group).__name__}"


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


def loss_scale_of(grad_scaler: Any, device: torch.device) -> LossScale:
    """The host's grad scaler, or a constant 1.0 where it has none."""
    return ConstantLossScale(1.0, device) if grad_scaler is None else HostLossScale(grad_scaler)


class HostLossScale:
    """The host's own grad scaler: its rules, its state.

    Args:
        grad_scaler: a MegatronGradScaler.
    """

    def __init__(self, grad_scaler: Any) -> None:
        self._grad_scaler = grad_scaler

    @property
    def scale(self) -> Tensor:
        """fp32 [1]."""
        scale: Tensor = self._grad_scaler.scale
        return scale

    @property
    def value(self) -> float:
        """The scale as a Python number; the CPU waits for the device."""
        return float(self.scale.item())

    def can_back_off(self) -> bool:
        """A dynamic scaler until its scale is at the minimum, a constant one never."""
        minimum = getattr(self._grad_scaler, "min_scale", None)
        return minimum is not None and bool(self.scale > minimum)

    def update(self, found_nonfinite: bool) -> None:
        """Updates the scale; called once a step."""
        self._grad_scaler.update(found_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """The host's."""
        return dict(self._grad_scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The host's."""
        self._grad_scaler.load_state_dict(state)


@dataclass(frozen=True)
class StartUp:
    """What ranks must agree on before the first step.

    Args:
        named: the params that are updated, by name.
        plan: what the host decided about the step.
        layouts: of the buffers.
        grad_dtypes: of the buffers.
        host_options: whatever else of the host's options decides what is sent when; equal on all ranks.
    """

    named: Mapping[str, Parameter]
    plan: StepPlan
    layouts: Sequence[BufferLayout]
    grad_dtypes: Sequence[str]
    host_options: tuple[str, ...] = ()

    def of_everyone(self) -> list[Field]:
        """What all ranks of the model must have alike."""
        return [
            Field("package version", (VERSION,)),
            Field("options", self.plan.config.described()),
            Field("host options", self.host_options),
        ]

    def of_data_parallel(self) -> list[Field]:
        """What ranks that hold the same params must have alike."""
        specs = [spec_of(name, param) for name, param in self.named.items()]
        groups = list(enumerate(self.plan.groups))
        return [
            Field("param names", tuple(spec.name for spec in specs)),
            Field("param shapes", tuple(f"{spec.name}{list(spec.shape)}" for spec in specs)),
            Field("param dtypes", tuple(f"{spec.name} {spec.dtype}" for spec in specs)),
            Field("param groups", tuple(f"group {index}: {_options_of(group)}" for index, group in groups)),
            Field(
                "param group members", tuple(f"{name} in {index}" for index, group in groups for name in group.names)
            ),
            Field("params excluded from the norm", tuple(filter(self.plan.excluded_from_norm, self.named))),
            Field("inner optimizer", (self.plan.choice.name, *self.plan.choice.defaults)),
            Field("buffer layout", tuple(self._layout_items())),
        ]

    def _layout_items(self) -> Iterator[str]:
        for layout, dtype in zip(self.layouts, self.grad_dtypes, strict=True):
            yield f"{layout.num_shards} shards of {dtype} grads"
            yield from map(str, layout.buckets)
            yield from map(str, layout.slots)


def compare_ranks(start_up: StartUp, data: Group, everyone: Group, *, may_be_empty: bool = False) -> None:
    """Collective: compares all that ranks must have alike; a difference in one data-parallel group stops all ranks.

    Args:
        start_up: of this rank.
        data: ranks that hold the same params.
        everyone: all ranks of the model.
        may_be_empty: whether a param group may have no trained param on any rank.

    Raises:
        RanksDisagreeError: on all ranks.
    """
    if not may_be_empty:
        check_groups_are_used(start_up.plan.groups, everyone)
    compare(start_up.of_everyone(), everyone)
    raise_together(lambda: compare(start_up.of_data_parallel(), data), everyone)


def _options_of(group: ParamGroup) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(group.options.items()))


@contextmanager
def timed(timers: Any, name: str, *, barrier: bool) -> Iterator[None]:
    """Times what runs meanwhile with a timer of the host, and names it in a profiler.

    Args:
        timers: of the host; None where it has none.
        name: that the host's log expects.
        barrier: whether ranks wait for each other before.
    """
    with profiled(name):
        if timers is None:
            yield
            return
        timers(name, log_level=1).start(barrier=barrier)
        try:
            yield
        finally:
            timers(name).stop()
