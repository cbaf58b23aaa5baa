"""The plan that a rank makes before anything is moved, including which communication is overlapped.

The fork's own DistributedDataParallel has neither overlap nor buckets.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from megatron import get_args
from megatron.core import tensor_parallel
from megatron.model.module import param_is_not_shared
from megatron.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group, Reduction, shares_memory
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig, config_from_arguments, config_from_environment
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.megatron.grad_scaler import loss_scale_of
from megatron_distopt.hosts.megatron.inner_optimizers import inner_for, plan_groups
from megatron_distopt.hosts.megatron.muon_groups import MUON, MuonRequest, muon_and_adam
from megatron_distopt.hosts.megatron.naming import names_by_param
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan, dense_group, plan_grad_buffers
from megatron_distopt.hosts.megatron_2023.facts import GATHERS_STATE, check_flags
from megatron_distopt.hosts.megatron_2023.fork_muon import muon_matrices
from megatron_distopt.hosts.megatron_2023.translate import (
    check_model,
    merge_config,
    with_host_flags,
)
from megatron_distopt.hosts.start import check_bucket_size, reduction_of
from megatron_distopt.layout import ParamSpec, default_bucket_size, lay_out
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.offload import check_offload
from megatron_distopt.optimizer.owners.whole_params import TrainedParams
from megatron_distopt.optimizer.sharded import StepPlan


@dataclass(frozen=True)
class OverlapPlan:
    """Which communication is overlapped, and in which buckets."""

    grads: bool  # with backward
    params: bool  # with the next forward pass
    # takes the elements of a buffer and returns those of a bucket; None for one bucket
    bucket_size: Callable[[int], int] | None
    why_not: str = ""  # why grads are not overlapped, for the start-up block

    def __str__(self) -> str:
        grads = "overlapped with backward" if self.grads else f"after backward ({self.why_not})"
        return (
            f"grads {grads}, params {'overlapped with' if self.params else 'before'} the next "
            "forward"
        )


@dataclass(frozen=True)
class StartPlan:
    """The plan."""

    named: Mapping[str, Parameter]  # params that are updated, by name
    buffers: tuple[BufferPlan, ...]  # in the order in which every rank reduces them
    data: Group  # the ranks over which dense params are sharded
    device: torch.device  # of all params
    plan: StepPlan
    # fp16 grads are divided before they are added up; others are averaged in the step
    how: Reduction
    host_groups: Sequence[Mapping[str, Any]]  # the param groups as the fork's files have them
    overlap: OverlapPlan = OverlapPlan(grads=False, params=False, bucket_size=None)

    def overlapping(self) -> StartPlan:
        """The same plan with the decision about overlap. Called after the ranks of `data` have
        communicated once."""
        overlap = _plan_overlap(self.plan.config, self.data, self.buffers, self.device, get_args())
        return dataclasses.replace(self, overlap=overlap)

    def in_buckets(self, late: Collection[str]) -> StartPlan:
        """The same plan with buffers cut into buckets, if that was decided.

        The fork adds to the gradients of `late` params after backward, so they get buckets of their
        own at the end.
        """
        buffers = tuple(_in_buckets(buffer, self.overlap, late) for buffer in self.buffers)
        return dataclasses.replace(self, buffers=buffers)


def plan_start(
    base: Optimizer,
    clip_grad: float,
    count_zeros: bool,
    grad_scaler: Any,
    models: Sequence[Module],
    options: DistOptConfig | None,
) -> StartPlan:
    """Checks everything and moves nothing. The arguments are those of the optimizer's
    constructor."""
    args = get_args()
    check_flags(args)
    names = names_by_param(models)
    named = {name: param for param, name in names.items() if param.requires_grad}
    own = config_from_environment(os.environ, config_from_arguments(args, options))
    config = merge_config(own, base, clip_grad, count_zeros, grad_scaler)
    device = check_model(models, named, config)
    config = with_host_flags(config, base, args, device.type)
    data = dense_group()
    buffers = plan_grad_buffers(models, names)
    if any(buffer.is_ours for buffer in buffers):
        check_compatible(config, {Feature.FORK_EXPERTS: "a model with experts"})
    choice, groups = _choose(base, config, args, device, named, buffers)
    if choice.updates_whole_params:
        check_compatible(config, {Feature.WHOLE_PARAMS: choice.name})
    gathers_state = hasattr(HostDistributedOptimizer, GATHERS_STATE)
    if not gathers_state:
        check_compatible(config, {Feature.PER_RANK_FILES: "per-rank files"})
    if choice.updates_whole_params and not gathers_state:
        raise ConfigError(
            f"{choice.name} updates whole params, but the per-rank files of this fork cannot hold "
            "its state. Write --optimizer adam or sgd, or --distopt-optimizer muon. Or use a fork "
            "with a gathered file, such as Megatron-LM 23.06 or newer or Megatron-DeepSpeed."
        )
    layouts = []
    for buffer in buffers:  # the state of fp32 params in a buffer stays on the device
        short = {param.dtype for param in buffer.params.values()} - {torch.float32}
        layouts.append((buffer.layout, next(iter(short), torch.float32)))
    check_offload(layouts, config, device, choice)
    divide_by = data.size if any(buffer.dtype is torch.float16 for buffer in buffers) else 1
    plan = StepPlan(
        groups=plan_groups(named, groups, choice),
        choice=choice,
        config=config,
        loss_scale=loss_scale_of(grad_scaler, device),
        stats_group=Group.of,
        average_over=data.size // divide_by,
        # The fork itself marks shared and duplicated params, see optimizer/grad_norm.py.
        excluded_from_norm=lambda name: (
            not param_is_not_shared(named[name])
            or not tensor_parallel.param_is_not_tensor_parallel_duplicate(named[name])
        ),
    )
    how = reduction_of(config, [buffer.dtype for buffer in buffers], divide_by)
    is_of_class = choice.updates_whole_params or config.optimizer == MUON
    host_groups = groups if is_of_class else base.param_groups
    return StartPlan(named, buffers, data, device, plan, how, host_groups)


def _choose(
    base: Optimizer,
    config: DistOptConfig,
    args: Any,
    device: torch.device,
    named: Mapping[str, Parameter],
    buffers: Sequence[BufferPlan],
) -> tuple[InnerChoice, Sequence[Mapping[str, Any]]]:
    """The inner optimizer and its param groups. With Muon, an Adam updates the params that are not
    matrices of layers."""
    group_of = {name: plan.group for plan in buffers for name in plan.params}
    if config.optimizer != MUON:
        trained = TrainedParams.of(named, group_of.__getitem__)
        return inner_for(base, config, device.type, trained)
    check_compatible(config, {Feature.WHOLE_PARAMS: "Muon"})
    request = MuonRequest.of(config)
    matrices, groups = muon_matrices(base, request, buffers, args)
    adam, _ = inner_for(base, dataclasses.replace(config, optimizer="adam"), device.type)
    return muon_and_adam(adam, matrices, config, request), groups


def num_microbatches_of() -> Callable[[], int] | None:
    """The fork's function for the number of microbatches of a step; None if it has none."""
    for name in ("megatron", "megatron.global_vars"):
        count: Callable[[], int] | None = getattr(import_module(name), "get_num_microbatches", None)
        if count is not None:
            return count
    return None


def _plan_overlap(
    config: DistOptConfig,
    data: Group,
    buffers: Sequence[BufferPlan],
    device: torch.device,
    args: object,
) -> OverlapPlan:
    """Decides which communication is overlapped, from the options and from what the fork allows.
    Each of `buffers` is one bucket, as the fork has them."""
    check_bucket_size(config, data.size, "--distopt-bucket-size 40000000")
    params = config.overlap_param_gather and data.size > 1
    features: dict[Feature, str] = {}
    if getattr(args, "log_params_norm", False):
        features[Feature.PARAM_READERS] = "--log-params-norm"
    elif getattr(args, "vision_pretraining_type", None) == "dino":
        features[Feature.PARAM_READERS] = "--vision-pretraining-type dino"
    if config.bucket_size is not None:
        features[Feature.FORK_BUCKETS] = f"bucket_size={config.bucket_size}"
    elif config.overlap_grad_reduce or params:
        features[Feature.FORK_BUCKETS] = (
            "overlap_grad_reduce" if config.overlap_grad_reduce else "overlap_param_gather"
        )
    check_compatible(config, features)

    def bucket_size(numel: int) -> int:
        return config.bucket_size or default_bucket_size(numel, data.size)

    is_one_bucket = all(
        bucket_size(each.layout.numel) >= each.layout.numel for each in buffers if not each.is_ours
    )
    why_not = _why_not(config, data, device, args, is_one_bucket=is_one_bucket)
    grads = config.overlap_grad_reduce if config.overlap_grad_reduce is not None else not why_not
    has_buckets = grads or params or config.bucket_size is not None
    return OverlapPlan(grads, params, bucket_size if has_buckets else None, why_not)


def _why_not(
    config: DistOptConfig, data: Group, device: torch.device, args: object, *, is_one_bucket: bool
) -> str:
    """Why overlapping grads with backward is not safe or gains nothing; empty if it is safe and
    gains."""
    if num_microbatches_of() is None:
        if config.overlap_grad_reduce:
            raise ConfigError(
                "overlap_grad_reduce needs the number of microbatches, but the fork has no "
                "get_num_microbatches. Write --distopt-overlap-grad-reduce no, or add that "
                "function to the fork."
            )
        return "the number of microbatches is unknown"
    reasons = {
        "asked for": config.overlap_grad_reduce is False,
        "checkpoint_format is gathered": config.checkpoint_format == "gathered",
        "one data-parallel rank": data.size == 1,
        "a kernel of the fork adds gradients up": bool(
            getattr(args, "gradient_accumulation_fusion", False)
        ),
        "all grads fit into one bucket": is_one_bucket,
        # The CPU would copy while it computes, which hides nothing and costs more than copying
        # afterwards.
        "its ranks share memory": shares_memory(device, data),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _in_buckets(plan: BufferPlan, overlap: OverlapPlan, late: Collection[str]) -> BufferPlan:
    """Cuts a buffer of one bucket into buckets. Params keep the fork's order, which is roughly the
    order of backward."""
    if overlap.bucket_size is None or plan.is_ours:
        return plan
    # Experts, which also have a place in the fork's buffer, are in a buffer of their own.
    slots = [slot for slot in plan.layout.slots if slot.name in plan.params]
    specs = [ParamSpec(slot.name, slot.in_buffer.numel) for slot in slots]
    layout = lay_out(
        [spec for spec in specs if spec.name not in late],
        last=[spec for spec in specs if spec.name in late],
        num_shards=plan.group.size,
        bucket_size=overlap.bucket_size(plan.layout.numel),
    )
    return dataclasses.replace(plan, layout=layout)
