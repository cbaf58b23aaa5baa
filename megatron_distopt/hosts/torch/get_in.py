"""`distribute(...)` gives any `torch.nn.Module` a distributed optimizer, without a Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name, memory_order
from megatron_distopt.comm import Field, Group, ProcessGroup, compare, meet_in_call, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.report import describe, sharded_over
from megatron_distopt.hosts.start import begin_communication, compare_ranks
from megatron_distopt.hosts.torch.ddp import is_ignored
from megatron_distopt.hosts.torch.model import ShardedModel
from megatron_distopt.hosts.torch.module_buffers import KEEP_BUFFERS
from megatron_distopt.hosts.torch.optimizer import TorchDistributedOptimizer
from megatron_distopt.hosts.torch.step import announce_drop
from megatron_distopt.hosts.torch.translate import GivenToDistribute, ModelPlan, plan_model
from megatron_distopt.layout import Placement
from megatron_distopt.session.announce import announce


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
        optimizer: an element-wise optimizer of torch's or of your own over params of the model,
            before its first step. Its param groups are used; its frozen params begin to train when
            they are unfrozen. `torch.optim.Muon` works too, and so does a list of it and a torch
            Adam for the params that are not matrices. Without an optimizer, the config decides; the
            default is an Adam with decoupled weight decay over the whole model.
        config: options that torch has no name for.
        param_groups: as for `torch.optim`; only without an optimizer.
        process_group: data-parallel ranks, which hold the same params; None for all ranks.
        stats_process_group: all ranks that hold a part of the model. Gradient statistics are summed
            over them. None for `process_group`.
        excluded_from_norm: takes a param name and returns whether this rank leaves the param out of
            those statistics. If several ranks of `stats_process_group` hold a param in addition to
            data parallelism, return True on all but one of them.
        placement: takes a name and its param and returns where this rank's part lies in the whole
            model. Checkpoints of a model that is cut over `stats_process_group` need it.
        broadcast_buffers: whether module buffers that training changes (running statistics) follow
            rank 0 after each step.
        options: fields of `DistOptConfig`, such as `clip_grad=1.0`.

    Raises:
        ConfigError, LayoutError, RanksDisagreeError: on all ranks, before anything is allocated.
    """
    data, everyone = Group.of(process_group), Group.of(stats_process_group or process_group)
    meet_in_call("distribute", everyone)
    given = GivenToDistribute(
        model=model,
        optimizer=optimizer,
        config=config,
        param_groups=param_groups,
        options=options,
        excluded_from_norm=excluded_from_norm,
        placement=placement,
        broadcast_buffers=broadcast_buffers,
    )
    # The plan lives as long as the model and must not refer to the user's optimizers: they refer to
    # ours, and the cycle would keep the model alive.
    plan, optimizers = raise_together(lambda: plan_model(given, data, everyone), everyone)
    _compare(plan, everyone)
    own = plan.step.config
    dtypes = {dtype for each in plan.sets for dtype in (each.grad_dtype, each.dtype)}
    begin_communication(own, plan.how, plan.device, everyone, [data], dtypes)
    sharded = ShardedModel(plan, announce_drop)
    if everyone.rank == 0:
        _announce(sharded, plan)
    return TorchDistributedOptimizer(sharded, plan.torch_groups, optimizers)


def _announce(sharded: ShardedModel, plan: ModelPlan) -> None:
    """Logs the block that shows what is active."""
    config = plan.step.config
    overlaps = {"grads": config.overlap_grad_reduce, "params": config.overlap_param_gather}
    words = [f"{what} {'' if is_on else 'not '}overlapped" for what, is_on in overlaps.items()]
    more = [
        f"groups     {sharded_over(plan.device, plan.data, plan.how)}",
        f"overlap    {', '.join(words)}",
    ]
    if not sharded.had_same_values:
        more.append("values     of params differed between ranks: all now have those of rank 0")
    announce(describe("a torch program", ("distribute",), [sharded.sharded], plan.device, *more))


def _compare(plan: ModelPlan, everyone: Group) -> None:
    """Collective: compares ranks, including frozen params and module buffers, with which all ranks
    must begin alike."""

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
