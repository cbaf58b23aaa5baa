"""The plain host: any `torch.nn.Module`, no Megatron around it."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_distopt.buffers import dtype_name, memory_order
from megatron_distopt.checkpoint.param_groups import check_options
from megatron_distopt.comm import Field, Group, ProcessGroup, compare, meet_in_call, raise_together
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig, config_from_environment, with_options
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.hosts.base import (
    as_torch_groups,
    begin_communication,
    check_bucket_size,
    compare_ranks,
    named_params,
    reduction_of,
)
from megatron_distopt.hosts.between_steps import check_own_memory
from megatron_distopt.hosts.report import describe, sharded_over
from megatron_distopt.hosts.torch.ddp import check_strides, is_ignored
from megatron_distopt.hosts.torch.model import (
    KEEP_BUFFERS,
    ModelPlan,
    ShardedModel,
    check_trained,
    name_groups,
    plan_sets,
)
from megatron_distopt.hosts.torch.optimizer import TorchDistributedOptimizer
from megatron_distopt.hosts.torch.params import is_updated
from megatron_distopt.hosts.torch.step import announce_drop
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.accelerator import check_devices, find_accelerator
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner, fused_instance
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from megatron_distopt.optimizer.offload import check_offload
from megatron_distopt.optimizer.owners.given import check_new
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.owners.sharded_muon import (
    Matrices,
    adopt_muon,
    is_muon,
    matrices_in,
)
from megatron_distopt.optimizer.owners.whole_params import TrainedParams
from megatron_distopt.optimizer.sharded import StepPlan
from megatron_distopt.session.announce import announce

#: Options of an optimizer that is made here.
_OF_OWN_OPTIMIZER = ("adam", "optimizer", "lr", "weight_decay", "betas", "eps", "momentum", "decay")


def _as_it_is(name: str, param: Parameter) -> Placement:
    """Every rank has the whole param under its own name."""
    return Placement(name, tuple(param.shape))


def distribute(
    model: Module | Sequence[Module],
    optimizer: Optimizer | Sequence[Optimizer] | DistOptConfig | None = None,
    config: DistOptConfig | None = None,
    *,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    process_group: ProcessGroup | None = None,
    stats_process_group: ProcessGroup | None = None,
    excluded_from_norm: Callable[[str], bool] = lambda name: False,
    placement: Callable[[str, Parameter], Placement] = _as_it_is,
    broadcast_buffers: bool = True,
    **options: Any,
) -> TorchDistributedOptimizer:
    """Collective: moves the model's params into contiguous buffers and returns their distributed
    optimizer.

    Gradients are averaged over the ranks in `step()`, so the model is not wrapped in
    DistributedDataParallel. All ranks start from the params and module buffers that the group's
    rank 0 has.

    Examples:
        >>> import torch, torch.distributed as dist, megatron_distopt
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = megatron_distopt.distribute(model, adamw, clip_grad=1.0)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(3, 4, dtype=torch.bfloat16)).float().square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.last_step.updated
        True
        >>> dist.destroy_process_group()

    Args:
        model: one module, or several whose params are optimized together; on its device, in its
            dtypes.
        optimizer: any element-wise optimizer of torch's or of your own over params of the model,
            not yet stepped. Its groups are used; those of its params that are frozen train once
            they are not. Also `torch.optim.Muon`, and a list of it and an Adam of torch's for the
            params that are no matrices. Without one, an Adam with decoupled weight decay over the
            whole model, or what the config says.
        config: options that torch has no name for.
        param_groups: as for `torch.optim`; only without an optimizer.
        process_group: data-parallel ranks, which hold the same params; all ranks where None.
        stats_process_group: ranks that hold a part of the model, over which gradient statistics are
            added up; `process_group` where None.
        excluded_from_norm: by param name, whether this rank leaves it out of those statistics: True
            on all but one rank for a param that several ranks of `stats_process_group` hold in
            addition to data parallelism.
        placement: from a name and its param to where this rank's part lies in the whole model, for
            checkpoints of a model that is cut over `stats_process_group`.
        broadcast_buffers: whether module buffers that training changes (running statistics) follow
            rank 0 after each step.
        options: fields of `DistOptConfig`, such as `clip_grad=1.0`.

    Raises:
        ConfigError, LayoutError, RanksDisagreeError: on all ranks, before anything is allocated.
    """
    data, everyone = Group.of(process_group), Group.of(stats_process_group or process_group)

    def planned() -> tuple[ModelPlan, tuple[Optimizer, ...]]:
        """What this rank decides by itself."""
        chunks, given, merged = _checked(model, optimizer, config, param_groups, options)
        merged = config_from_environment(os.environ, merged)
        for each in given:
            _check_unused(each, merged)
        check_compatible(merged, {Feature.OWN_LOOP: "distribute(...)"})
        # Reverse of registration is roughly the order in which backward finishes gradients.
        named = dict(reversed(named_params(chunks).items()))
        torch_groups = _torch_groups(given, param_groups, named)
        named = _without_those_of_others(named, torch_groups)
        for name, param in named.items():
            _check_param(name, param)
        trained = _trained(named, torch_groups)
        check_trained(trained, merged)
        check_own_memory(named)
        device = check_devices(
            {param.device for param in trained.values()}, find_accelerator(merged.accelerator)
        )
        if device.type == CPU and data.backend == "nccl":
            rule, remedy = (
                "carry tensors of the model's device",
                "Move the model to the GPU, or use backend 'gloo'",
            )
            raise ConfigError(
                refusal("process group", f"nccl for a model on {device}", rule, remedy)
            )
        check_bucket_size(merged, data.size, "bucket_size=40_000_000")
        choice = _choose(given, merged, device, named, data)
        sets = plan_sets(trained, merged, data.size)
        check_offload([(each.layout, each.dtype) for each in sets], merged, device, choice)
        groups = name_groups(torch_groups, trained)
        for number, group in enumerate(groups):
            check_options(number, group.options, choice)
        of_whole = [
            group
            for group in groups
            if choice.updates_whole_params or is_muons_group(group.options)
        ]
        for name in (name for group in of_whole for name in group.names):
            _check_whole(placement(name, named[name]), choice.name)
        check_strides(trained if of_whole else {})
        scale = make_loss_scale(merged, device)
        step = StepPlan(
            groups, choice, merged, scale, lambda: everyone, data.size, excluded_from_norm
        )
        how = reduction_of(merged, [each.grad_dtype for each in sets])
        plan = ModelPlan(
            chunks,
            named,
            torch_groups,
            sets,
            step,
            data,
            device,
            how,
            placement,
            broadcast_buffers,
            keeps_strides=not of_whole,
        )
        return plan, given

    meet_in_call("distribute", everyone)
    # The plan lives as long as the model, which must not keep the user's optimizers: they lead to
    # ours.
    plan, given = raise_together(planned, everyone)
    _compare(plan, everyone)
    own = plan.step.config
    dtypes = {dtype for each in plan.sets for dtype in (each.grad_dtype, each.dtype)}
    begin_communication(own, plan.how, plan.device, everyone, [data], dtypes)
    sharded = ShardedModel(plan, announce_drop)
    if everyone.rank == 0:
        groups = f"groups     {sharded_over(plan.device, data, plan.how)}"
        overlaps = {"grads": own.overlap_grad_reduce, "params": own.overlap_param_gather}
        overlap = ", ".join(
            f"{what} {'overlapped' if is_on else 'not overlapped'}"
            for what, is_on in overlaps.items()
        )
        more = [groups, f"overlap    {overlap}"]
        if not sharded.had_same_values:
            more.append("values     of params differed between ranks: all have those of rank 0 now")
        announce(
            describe("a torch program", ("distribute",), [sharded.sharded], plan.device, *more)
        )
    return TorchDistributedOptimizer(sharded, plan.torch_groups, given)


# --- what was given


def _checked(
    model: Any, optimizer: Any, config: Any, param_groups: Any, options: Mapping[str, Any]
) -> tuple[list[Module], tuple[Optimizer, ...], DistOptConfig]:
    """The modules, optimizers and config that were given; refuses what is of another kind, with the
    call to write."""
    chunks = [model] if isinstance(model, Module) else list(model)
    wrong = [each for each in chunks if not isinstance(each, Module)]
    if wrong or not chunks:
        got = (
            "its params"
            if wrong and isinstance(wrong[0], Parameter)
            else f"a {type(model).__name__}"
        )
        rule, remedy = (
            "be a torch.nn.Module or a list of them",
            "Write distribute(model, optimizer)",
        )
        raise ConfigError(refusal("model", got, rule, remedy))
    if isinstance(optimizer, DistOptConfig) and config is None:
        optimizer, config = None, optimizer
    is_given = optimizer is not None
    given = (
        tuple(optimizer)
        if isinstance(optimizer, (list, tuple))
        else (optimizer,)
        if is_given
        else ()
    )
    if is_given and not given:
        remedy = "Write distribute(model, [torch.optim.Muon(...), torch.optim.AdamW(...)])"
        raise ConfigError(refusal("optimizer", "an empty list", "hold optimizers", remedy))
    for each in given:
        _check_optimizer(each, is_alone=len(given) == 1)
    if config is not None and not isinstance(config, DistOptConfig):
        remedy = "Write distribute(model, optimizer, DistOptConfig(...))"
        raise ConfigError(
            refusal("config", f"a {type(config).__name__}", "be a DistOptConfig", remedy)
        )
    if is_given and param_groups is not None:
        remedy = "Give the groups to the optimizer's constructor"
        raise ConfigError(
            refusal(
                "param_groups", "given together with an optimizer", "be the optimizer's own", remedy
            )
        )
    return chunks, given, with_options(config or DistOptConfig(), options)


def _check_optimizer(optimizer: Any, *, is_alone: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else "torch.optim.AdamW"
        remedy = f"Write distribute(model, {name}(model.parameters(), lr=...))"
        got = (
            f"the class {name}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        )
        raise ConfigError(
            refusal("optimizer", got, "be a torch.optim.Optimizer or a DistOptConfig", remedy)
        )
    kinds = [
        name
        for name in vars(optimizer)
        if name.startswith("_optimizer_") and name.endswith("_hooks")
    ]
    if not is_alone and any(vars(optimizer)[name] for name in kinds):
        # Hooks of one of several optimizers would be called with another one.
        got, rule = (
            f"hooks of {type(optimizer).__name__}, one of several optimizers",
            "be of all params together",
        )
        remedy = "Register them on what distribute(...) returns"
        raise ConfigError(refusal("hooks", got, rule, remedy))


def _check_unused(optimizer: Optimizer, config: DistOptConfig) -> None:
    """Refuses options of an optimizer that is made here, where one was given; `adam` also chooses
    low precision's."""
    is_full, default = Precision.of(config).is_full, DistOptConfig()
    for name in _OF_OWN_OPTIMIZER if is_full else _OF_OWN_OPTIMIZER[1:]:
        if name in config.explicit and getattr(config, name) != getattr(default, name):
            got, kind = (
                f"{getattr(config, name)!r} together with an optimizer object",
                type(optimizer).__name__,
            )
            remedy = (
                f"Give it to the constructor of {kind} if that has it, or leave {name} or the "
                "optimizer out"
            )
            raise ConfigError(refusal(name, got, f"be left to {kind}", remedy))


def _without_those_of_others(
    named: dict[str, Parameter], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Parameter]:
    """Leaves out params of the model that another optimizer of ours updates, and this one not."""
    if any(map(is_updated, named.values())):
        gc.collect()  # the optimizer may be gone but for a cycle
    grouped = {param for group in groups for param in group["params"]}
    return {
        name: param for name, param in named.items() if param in grouped or not is_updated(param)
    }


def _check_param(name: str, param: Parameter) -> None:
    """Refuses a param of another optimizer of ours, and those that torch itself cannot treat as
    plain tensors."""
    if is_updated(param):
        raise LayoutError(
            f"Param {name!r} is in another distributed optimizer, and can be in one at a time. "
            "Call release() on the other one first, in Lightning in on_fit_end() of the module; or "
            "give each optimizer params of its own."
        )
    if isinstance(param, UninitializedParameter):
        remedy = "Run one batch through the model before distribute(...)"
        raise LayoutError(
            refusal(f"param {name!r}", "not initialized (a lazy module)", "have a shape", remedy)
        )
    if is_traceable_wrapper_subclass(param):
        got, rule = (
            f"a {type(param.data).__name__}",
            "be a plain tensor, whole on every data-parallel rank",
        )
        remedy = (
            "Take the model out of FSDP, tensor parallelism or quantization before distribute(...)"
        )
        raise LayoutError(refusal(f"param {name!r}", got, rule, remedy))


# --- what is decided


def _torch_groups(
    optimizers: tuple[Optimizer, ...],
    given: Sequence[Mapping[str, Any]] | None,
    named: Mapping[str, Parameter],
) -> list[dict[str, Any]]:
    """The user's groups; one of the whole model, frozen params included, where there are none."""
    if given is None and optimizers:
        # Of one optimizer the list itself, which may grow; of several the dicts, whose options
        # schedulers write.
        groups = optimizers[0].param_groups
        groups = (
            groups
            if len(optimizers) == 1
            else [group for each in optimizers for group in each.param_groups]
        )
    else:
        groups = as_torch_groups(given if given is not None else [{"params": list(named.values())}])
    known, seen = (
        set(named.values()),
        Counter(param for group in groups for param in group["params"]),
    )
    foreign = sum(param not in known for param in seen)
    if foreign:
        remedy = (
            "Call distribute([model, other_module], ...) with every module whose params the "
            "optimizer has"
        )
        raise LayoutError(
            refusal("param groups", f"{foreign} params that the model has not", "be of it", remedy)
        )
    twice = [name for name, param in named.items() if seen[param] > 1]
    if twice:
        remedy = "Leave it out of one of them"
        raise LayoutError(
            refusal(f"param {twice[0]!r}", "in 2 param groups", "be in at most 1", remedy)
        )
    return groups


def _trained(
    named: Mapping[str, Parameter], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Parameter]:
    """The params that train: those in a group that are neither frozen nor empty. As in torch,
    others are left alone."""
    grouped = {param for group in groups for param in group["params"]}
    return {
        name: param
        for name, param in named.items()
        if param in grouped and param.requires_grad and param.numel() and not param.is_sparse
    }


def _choose(
    given: Sequence[Optimizer],
    config: DistOptConfig,
    device: torch.device,
    named: Mapping[str, Parameter],
    data: Group,
) -> InnerChoice:
    """The inner optimizer for what the user gave."""
    params = TrainedParams(
        {name: tuple(param.shape) for name, param in named.items()}, lambda name: data
    )
    if not given:
        return choose_inner(config, device.type, params)
    for each in given:
        check_new(each)
    if len(given) > 1 or is_muon(given[0]):
        specs = {
            key: spec
            for each in given
            if is_muon(each)
            for key, spec in matrices_in(each, named).items()
        }
        return adopt_muon(given, Matrices(specs, lambda name: data), config, device.type)
    return fused_instance(given[0], config, device.type) or adopt_instance(given[0], params, config)


def _check_whole(place: Placement, optimizer: str) -> None:
    if place.dim is not None:
        got = f"cut along dimension {place.dim}"
        rule = f"be whole on every data-parallel rank where {optimizer} updates it"
        raise LayoutError(
            refusal(
                f"param {place.name!r}", got, rule, "Give it to AdamW, or train without cutting it"
            )
        )


def _compare(plan: ModelPlan, everyone: Group) -> None:
    """Collective: compares ranks, also in frozen params and module buffers, which all begin with
    alike."""

    def described(name: str, tensor: Tensor) -> str:
        return f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}"

    trained = {name: param for each in plan.sets for name, param in each.named.items()}
    buffers = [(each.layout, each.grad_dtype) for each in plan.sets]
    # groups of frozen params
    compare_ranks(trained, plan.step, buffers, plan.data, may_be_empty=True)
    kinds = {
        name: "trained" if param.requires_grad else "frozen" for name, param in plan.named.items()
    }
    params = tuple(
        f"{described(name, param)}, {kinds[name]}"
        for name, param in plan.named.items()
        if not is_ignored(param)
    )
    orders = tuple(f"{name} {memory_order(each)}" for name, each in trained.items())
    fields = [
        Field("params of the model", params),
        Field("memory order of the dimensions of params", orders),
    ]
    if plan.broadcast_buffers:
        of_modules = tuple(
            described(name, buffer)
            for chunk in plan.chunks
            for name, buffer in chunk.named_buffers()
            if not is_ignored(buffer)
        )
        fields.append(Field("module buffers", of_modules, KEEP_BUFFERS))
    raise_together(lambda: compare(fields, plan.data), everyone)
