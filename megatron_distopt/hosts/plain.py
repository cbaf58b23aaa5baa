"""The plain host: any `torch.nn.Module`, no Megatron around it.

>>> import torch, torch.distributed as dist, megatron_distopt
>>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
>>> model = torch.nn.Linear(4, 2).bfloat16()
>>> optimizer = megatron_distopt.distribute(model, megatron_distopt.DistOptConfig(lr=1e-3, clip_grad=1.0))
>>> for _ in range(2):
...     optimizer.zero_grad()
...     loss = model(torch.ones(3, 4, dtype=torch.bfloat16)).float().square().mean()
...     optimizer.scale_loss(loss).backward()
...     result = optimizer.step()
>>> result.updated
True
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer, accumulate_into_buffer, dtype_name, move_into_buffer
from megatron_distopt.checkpoint import (
    Share,
    WholeModel,
    check_local_state_dict,
    load_local_state_dict,
    local_state_dict,
)
from megatron_distopt.checkpoint.load_any import load_any
from megatron_distopt.comm import (
    GradOverlap,
    Group,
    ProcessGroup,
    allow_shared_memory,
    raise_together,
    share_initial,
    try_collectives,
)
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.hosts.base import (
    StartUp,
    compare_ranks,
)
from megatron_distopt.hosts.comm_log import CommLog
from megatron_distopt.hosts.overlap import GradSync, as_it_arrives
from megatron_distopt.hosts.param_overlap import OverlappedParamSync, ParamSync
from megatron_distopt.hosts.plain_start import Part, Plan, Request, decide
from megatron_distopt.hosts.report import describe, sharded_over
from megatron_distopt.hosts.saver import Saver
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer import (
    CapturedStep,
    Memory,
    ShardedOptimizer,
    StepPlan,
    StepResult,
    make_loss_scale,
    measure_memory,
)
from megatron_distopt.optimizer.graph import Record

__all__ = ["PlainOptimizer", "distribute"]

_log = logging.getLogger("megatron_distopt")


def _as_it_is(name: str, param: Parameter) -> Placement:
    """Every rank has the whole param under its own name."""
    return Placement(name, tuple(param.shape))


def distribute(
    model: Module | Sequence[Module],
    config: DistOptConfig | None = None,
    *,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    optimizer: Optimizer | None = None,
    process_group: ProcessGroup | None = None,
    stats_process_group: ProcessGroup | None = None,
    counted: Callable[[str], bool] = lambda name: True,
    placement: Callable[[str, Parameter], Placement] = _as_it_is,
) -> PlainOptimizer:
    """Collective: moves the model's params into contiguous buffers and returns their distributed optimizer.

    All ranks start from the params (frozen ones too) and module buffers of the group's rank 0.

    Args:
        model: one module, or the chunks of a virtual pipeline; on its device, in its dtypes.
        config: MEGATRON_DISTOPT_* variables override it.
        param_groups: as for `torch.optim`; one group of everything where None.
        optimizer: an element-wise optimizer of your own over the model's params, not yet stepped; its groups are used.
        process_group: data-parallel ranks, which hold the same params; all ranks where None.
        stats_process_group: ranks that hold a part of the model, over which gradient statistics are added up;
            `process_group` where None.
        counted: by param name, whether this rank counts it in those statistics: False on all but one rank for a param
            that several ranks of `stats_process_group` hold beside data parallelism.
        placement: from a name and its param to where this rank's part lies in the whole model, for checkpoints of a
            model that is cut over `stats_process_group`.

    Raises:
        ConfigError, LayoutError, RanksDisagreeError: on all ranks, before anything is allocated.
    """
    data = Group.of(process_group)
    stats = Group.of(stats_process_group or process_group)
    chunks = [model] if isinstance(model, Module) else list(model)
    request = Request(chunks, config, param_groups, optimizer)
    plan = raise_together(lambda: decide(request, data), stats)
    step_plan = StepPlan(
        plan.groups,
        plan.choice,
        plan.config,
        make_loss_scale(plan.config, plan.device),
        lambda: stats,
        data.size,
        counted,
    )
    layouts, grad_dtypes = zip(*((part.layout, dtype_name(part.grad_dtype)) for part in plan.parts), strict=True)
    compare_ranks(StartUp(plan.named, step_plan, layouts, grad_dtypes), data, stats)
    allow_shared_memory(data, plan.config.shared_memory)
    raise_together(lambda: try_collectives(plan.device, data, plan.how), stats)
    buffers = [_allocate(part, data) for part in plan.parts]
    share_initial([buffer.param for buffer in buffers] + _outside_buffers(chunks), data)
    placements = {name: placement(name, param) for name, param in plan.named.items()}
    overlap = GradOverlap(buffers, data, how=plan.how) if plan.config.overlap_grad_reduce else None
    grads = GradSync(buffers, data, overlap, plan.how)
    as_it_arrives(plan.named if grads.overlap is not None else {}, grads.arrived)
    params = ParamSync(buffers, data)
    if plan.config.overlap_param_gather:
        params = OverlappedParamSync(buffers, data, chunks, plan.named)
    sharded = ShardedOptimizer(buffers, step_plan)
    if stats.rank == 0 and _log.isEnabledFor(logging.INFO):
        _log.info("%s", _described(sharded, plan, data))
    return PlainOptimizer(sharded, data, placements, grads, params)


def _described(sharded: ShardedOptimizer, plan: Plan, data: Group) -> str:
    """For a program that logs at INFO."""
    beside = {"grads": plan.config.overlap_grad_reduce, "params": plan.config.overlap_param_gather}
    overlap = ", ".join(f"{what} {'' if is_beside else 'not '}beside computation" for what, is_beside in beside.items())
    groups = f"groups     {sharded_over(plan.device, data, plan.how)}"
    return describe("a loop of its own", ("distribute",), [sharded], plan.device, groups, f"overlap    {overlap}")


def _allocate(part: Part, data: Group) -> ShardedBuffer:
    param = move_into_buffer(part.named, part.layout)
    grad = accumulate_into_buffer(part.named, part.layout, part.grad_dtype)
    return ShardedBuffer(part.layout, data.rank, grad, param)


def _outside_buffers(chunks: Sequence[Module]) -> list[Tensor]:
    """Frozen params, and what the modules keep beside their params."""
    frozen = [param.data for chunk in chunks for param in chunk.parameters() if not param.requires_grad]
    return frozen + [tensor for chunk in chunks for tensor in chunk.buffers()]


class PlainOptimizer(Optimizer):
    """The usual calls of an optimizer, around the sharded step. Made by `distribute`.

    It is a `torch.optim.Optimizer` for the sake of torch's schedulers, with the inner optimizer's groups and state.

    Args:
        sharded: updates what this rank owns.
        data: the data-parallel group.
        placements: of the params in the whole model, by name.
        grads: reduces them.
        params: gathers them.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        data: Group,
        placements: Mapping[str, Placement],
        grads: GradSync,
        params: ParamSync,
    ) -> None:
        # The constructor of torch's class would build groups and state of its own.
        self.sharded = sharded
        self._grads, self._params = grads, params
        self.data = data
        self.defaults = sharded.inner.defaults
        everyone = sharded.plan.stats_group()
        about: dict[str, str | int] = {"host": "any torch module", "ranks": everyone.size, "data_parallel": data.size}
        self._model = WholeModel([Share(sharded, placements, sharded.plan.counted)], about=about)
        self._saver = Saver(sharded.config, everyone)
        self._log = CommLog(sharded.config.log_communication, is_first=everyone.rank == 0)
        self._update: Callable[[], StepResult] = sharded.step

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Live: what a scheduler writes here is used by the next step. "params" are flat main params."""
        return self.sharded.inner.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state, by flat main param."""
        return self.sharded.inner.state

    @property
    def memory(self) -> Memory:
        """Bytes that this rank holds."""
        return measure_memory(self.sharded)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: a param that was in no buffer when the ranks were compared has no owner."""
        remedy = "Give all params to distribute(...); freeze what is to be trained later"
        raise LayoutError(refusal("add_param_group", "called", "happen before distribute(...)", remedy))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the grad buffers; they stay allocated, whatever `set_to_none` says.

        Collective with `overlap_grad_reduce`, where backward ran and no step followed.
        """
        self._grads.drop()

    def no_sync(self) -> AbstractContextManager[None]:
        """With `overlap_grad_reduce` all but the last backward of a step belong inside: buckets wait for the last."""
        return self._grads.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on, in fp32: a 16-bit loss would overflow when it is scaled."""
        return loss.float() * self.sharded.loss_scale.scale.squeeze()

    @torch.no_grad()
    def step(self) -> StepResult:  # type: ignore[override]
        """Collective: reduce-scatter, update, all-gather.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise".
        """
        gathered = self._params.finish()
        reduced = self._grads.finish()
        self._log.step(reduced, gathered)
        result = self._update()
        if result.may_have_updated:
            self._params.gather()
        return result

    def capture_step(self, record: Record | None = None) -> None:
        """From the second step after this on, all between reduce-scatter and all-gather is one launch of a graph.

        Args:
            record: see `CapturedStep`.

        Raises:
            ConfigError: the device records nothing, or the CPU has to decide in every step.
        """
        self._update = CapturedStep(self.sharded, record).step

    def finish_param_gather(self) -> None:
        """With `overlap_param_gather`: until all params are there.

        To be called before code outside of a forward pass reads or changes them. The model's `state_dict()` and the
        calls of this optimizer do it by themselves.
        """
        self._params.finish()

    def reload_model_params(self) -> None:
        """Call it after changing model params from outside; the main params follow."""
        self.finish_param_gather()
        self.sharded.reload_model_params()

    def save(self, folder: str | Path) -> None:
        """Collective: writes the state of all ranks, for any other data-parallel size.

        Args:
            folder: of the checkpoint, the same on all ranks; made where it is missing.

        Raises:
            CheckpointError: on a rank that cannot write; the folder holds what it held before.
            RanksDisagreeError: on the others.
        """
        self.finish_param_gather()
        self._saver.save(Path(folder), self._model)

    def finish_saving(self) -> None:
        """Collective: waits for a save in the background (`async_save`); raises what went wrong in it."""
        self._saver.finish()

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Collective: takes what `save` wrote, at this or any other size, and gathers the params.

        Args:
            folder: of the checkpoint, the same on all ranks; also one of other software that has these param names.

        Raises:
            CheckpointError: on a rank that finds a fault; nothing is changed on any rank then.
            RanksDisagreeError: on the others.
        """
        self.finish_saving()
        self.finish_param_gather()
        load_any(Path(folder), self._model, self.sharded.plan.stats_group())
        self._params.gather_now()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by param name, see checkpoint/state.py."""
        self.finish_param_gather()
        return local_state_dict(self.sharded)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective: takes this rank's `state_dict()` back and gathers the params.

        Raises:
            CheckpointError: on all ranks, where one of them cannot take its state; nothing is changed then.
        """
        self.finish_param_gather()
        raise_together(lambda: check_local_state_dict(self.sharded, state_dict), self.sharded.plan.stats_group())
        load_local_state_dict(self.sharded, state_dict)
        self._params.gather_now()
