"""The plain host: any `torch.nn.Module`, no Megatron around it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import Group, ProcessGroup, allow_shared_memory, raise_together, try_collectives
from megatron_distopt.config import DistOptConfig, with_options
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.hosts.base import StartUp, compare_ranks
from megatron_distopt.hosts.report import announce, describe, sharded_over
from megatron_distopt.hosts.torch.model import Ranks, ShardedModel, compare_models
from megatron_distopt.hosts.torch.optimizer import TorchDistributedOptimizer, owner_of
from megatron_distopt.hosts.torch.plan import Plan, decide
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.sharded import StepPlan


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
    """Collective: moves the model's params into contiguous buffers and returns their distributed optimizer.

    Gradients are averaged over the ranks in `step()`, so the model is not wrapped in DistributedDataParallel. All ranks
    start from the params and module buffers that the group's rank 0 has.

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
        model: one module, or several whose params are optimized together; on its device, in its dtypes.
        optimizer: any element-wise optimizer of torch's or of your own over params of the model, not yet stepped. Its
            groups are used; those of its params that are frozen train once they are not. Also `torch.optim.Muon`, and
            a list of it and an Adam of torch's for the params that are no matrices. Without one, an Adam with decoupled
            weight decay over the whole model, or what the config says.
        config: options that torch has no name for.
        param_groups: as for `torch.optim`; only without an optimizer.
        process_group: data-parallel ranks, which hold the same params; all ranks where None.
        stats_process_group: ranks that hold a part of the model, over which gradient statistics are added up;
            `process_group` where None.
        excluded_from_norm: by param name, whether this rank leaves it out of those statistics: True on all but one rank
            for a param that several ranks of `stats_process_group` hold in addition to data parallelism.
        placement: from a name and its param to where this rank's part lies in the whole model, for checkpoints of a
            model that is cut over `stats_process_group`.
        broadcast_buffers: whether module buffers that training changes (running statistics) follow rank 0 after each
            step.
        options: fields of `DistOptConfig`, such as `clip_grad=1.0`.

    Raises:
        ConfigError, LayoutError, RanksDisagreeError: on all ranks, before anything is allocated.
    """
    data = Group.of(process_group)
    ranks = Ranks(data, Group.of(stats_process_group or process_group))

    def planned() -> tuple[Plan, tuple[Optimizer, ...]]:
        chunks, optimizers, merged = _checked(model, optimizer, config, param_groups, options)
        return _planned(chunks, optimizers, merged, param_groups, data, placement), optimizers

    # The plan lives as long as the model, which must not keep the user's optimizers: they lead to ours.
    plan, given = raise_together(planned, ranks.stats)
    step_plan = StepPlan(
        plan.groups,
        plan.choice,
        plan.config,
        make_loss_scale(plan.config, plan.device),
        lambda: ranks.stats,
        data.size,
        excluded_from_norm,
    )
    _compare(plan, step_plan, ranks)
    allow_shared_memory(data, plan.config.shared_memory)
    raise_together(lambda: try_collectives(plan.device, data, plan.how), ranks.stats)
    sharded = ShardedModel(plan, step_plan, ranks, placement=placement, broadcast_buffers=broadcast_buffers)
    if ranks.stats.rank == 0:
        announce(_described(sharded, plan, data))
    return TorchDistributedOptimizer(sharded, plan.torch_groups, given)


def _planned(
    chunks: Sequence[Module],
    optimizers: tuple[Optimizer, ...],
    config: DistOptConfig,
    param_groups: Sequence[Mapping[str, Any]] | None,
    data: Group,
    placement: Callable[[str, Parameter], Placement],
) -> Plan:
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            _check_free(name, param)
    plan = decide(chunks, optimizers, config, param_groups, data)
    is_whole = plan.choice.updates_whole_params
    whole = {name for group in plan.groups if is_whole or is_muons_group(group.options) for name in group.names}
    for name in sorted(whole):
        _check_whole(placement(name, plan.named[name]), plan.choice.name)
    return plan


def _check_whole(place: Placement, optimizer: str) -> None:
    if place.dim is not None:
        got = f"cut along dimension {place.dim}"
        rule = f"be whole on every data-parallel rank where {optimizer} updates it"
        raise LayoutError(refusal(f"param {place.name!r}", got, rule, "Give it to AdamW, or train without cutting it"))


def _check_free(name: str, param: Parameter) -> None:
    if owner_of(param) is not None:
        gc.collect()  # it may be gone but for a cycle
    if owner_of(param) is not None:
        rule, remedy = "belong to one distributed optimizer", "Call release() on the other one first"
        raise LayoutError(refusal(f"param {name!r}", "in another distributed optimizer", rule, remedy))


def _checked(
    model: Any, optimizer: Any, config: Any, param_groups: Any, options: Mapping[str, Any]
) -> tuple[list[Module], tuple[Optimizer, ...], DistOptConfig]:
    """The modules, optimizers and config that were given to `distribute`.

    Raises:
        ConfigError: something of another kind was given, with the call that was meant.
    """
    chunks = [model] if isinstance(model, Module) else list(model)
    wrong = [each for each in chunks if not isinstance(each, Module)]
    if wrong or not chunks:
        got = "its params" if wrong and isinstance(wrong[0], Parameter) else f"a {type(model).__name__}"
        rule, remedy = "be a torch.nn.Module or a list of them", "Write distribute(model, optimizer)"
        raise ConfigError(refusal("model", got, rule, remedy))
    if isinstance(optimizer, DistOptConfig) and config is None:
        optimizer, config = None, optimizer
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for each in optimizers if optimizer is not None else ():
        _check_optimizer(each)
    if not optimizers:
        remedy = "Write distribute(model, [torch.optim.Muon(...), torch.optim.AdamW(...)])"
        raise ConfigError(refusal("optimizer", "an empty list", "hold optimizers", remedy))
    if config is not None and not isinstance(config, DistOptConfig):
        remedy = "Write distribute(model, optimizer, DistOptConfig(...))"
        raise ConfigError(refusal("config", f"a {type(config).__name__}", "be a DistOptConfig", remedy))
    if optimizer is not None and param_groups is not None:
        remedy = "Give the groups to the optimizer's constructor"
        raise ConfigError(refusal("param_groups", "given together with an optimizer", "be the optimizer's own", remedy))
    given = () if optimizer is None else optimizers
    for each in given if len(given) > 1 else ():
        _check_without_hooks(each)
    return chunks, given, with_options(config or DistOptConfig(), options)


def _check_without_hooks(optimizer: Optimizer) -> None:
    """Hooks of one of several optimizers would be called with another one."""
    kinds = [name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")]
    if any(vars(optimizer)[name] for name in kinds):
        got, rule = f"hooks of {type(optimizer).__name__}, one of several optimizers", "be of all params together"
        remedy = "Register them on what distribute(...) returns"
        raise ConfigError(refusal("hooks", got, rule, remedy))


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else "torch.optim.AdamW"
        remedy = f"Write distribute(model, {name}(model.parameters(), lr=...))"
        got = f"the class {name}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise ConfigError(refusal("optimizer", got, "be a torch.optim.Optimizer or a DistOptConfig", remedy))


def _compare(plan: Plan, step_plan: StepPlan, ranks: Ranks) -> None:
    """Collective: a difference between ranks stops all of them."""
    trained = {name: param for each in plan.sets for name, param in each.named.items()}
    layouts = [each.layout for each in plan.sets]
    grad_dtypes = [dtype_name(each.grad_dtype) for each in plan.sets]
    start_up = StartUp(trained, step_plan, layouts, grad_dtypes)
    compare_ranks(start_up, ranks.data, ranks.stats, may_be_empty=True)  # groups of frozen params
    raise_together(lambda: compare_models(plan.named, plan.chunks, ranks.data), ranks.stats)


def _described(sharded: ShardedModel, plan: Plan, data: Group) -> str:
    overlaps = {"grads": plan.config.overlap_grad_reduce, "params": plan.config.overlap_param_gather}
    overlap = ", ".join(f"{what} {'overlapped' if is_on else 'not overlapped'}" for what, is_on in overlaps.items())
    groups = f"groups     {sharded_over(plan.device, data, plan.how)}"
    return describe("a torch program", ("distribute",), [sharded.sharded], plan.device, groups, f"overlap    {overlap}")
