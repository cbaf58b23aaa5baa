"""The sharded step: ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, section 5.1) between a reduce-scatter of the grads and an all-gather of the params, which the host does.

[Note: bytes of a step] A bf16 param with an fp32 grad, on the rank that owns it, in bytes an element::

    gradient statistics      read grad                        4
    fused Adam               read grad                        4
                             read and write main param        8
                             read and write two moments      16
                             write back the divided grad      4   only where the divisor is not 1
    cast                     read main param                  4
                             write model param                2
                                                             --
                                                             42 (38 where the divisor is 1)

The floor is 30: read grad 4, main 8, moments 16, model param 2. The other 12 have reasons. The norm of the whole
gradient must be known before its first element is used (4). torch's fused kernel writes the divided gradient back (4).
No kernel of torch's writes the rounded param in the same sweep (4). tests/optimizer/test_bytes.py counts them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group, exchange
from megatron_distopt.config import DistOptConfig, NonFinitePolicy
from megatron_distopt.errors import NonFiniteGradError, refusal
from megatron_distopt.optimizer.grad_norm import GradStats, local_stats, nonfinite_params, reduce_stats
from megatron_distopt.optimizer.inner import InnerChoice, step_divided
from megatron_distopt.optimizer.loss_scale import LossScale
from megatron_distopt.optimizer.main_params import MainRun, ParamGroup, RunKey, build_main_runs

__all__ = [
    "ShardedOptimizer",
    "StepPlan",
    "StepResult",
    "Verdict",
    "clip_divisor",
    "judge_together",
    "measure_together",
]

_log = logging.getLogger("megatron_distopt")


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Args:
        updated: False where it was skipped; params, moments and step counts are then bit for bit as before.
        grad_norm: L2 norm of the averaged, unscaled gradient before clipping; None where the step was skipped.
        num_zeros: elements of the gradient that are exactly zero; None where they were not counted.
    """

    updated: bool
    grad_norm: float | None
    num_zeros: int | None


class Verdict(Enum):
    """What becomes of a step once the gradient is known on all ranks."""

    #: The params are updated.
    UPDATE = "update"
    #: Nothing is touched but the loss scale.
    SKIP = "skip"


def clip_divisor(norm: float, clip_grad: float) -> float:
    """What the gradient is divided by so that its norm is at most `clip_grad`; 1.0 where it already is.

    Args:
        norm: of the gradient; one that is not finite clips nothing.
        clip_grad: 0 for no clipping.

    Source: `clip_grad_by_total_norm_fp32` of megatron-core, which multiplies by clip_grad / (norm + 1e-6) if below 1.

    >>> clip_divisor(8.0, 0.0), clip_divisor(0.5, 1.0), round(clip_divisor(8.0, 1.0), 3)
    (1.0, 1.0, 8.0)
    """
    if clip_grad <= 0 or not math.isfinite(norm):
        return 1.0
    return max((norm + 1e-6) / clip_grad, 1.0)


@dataclass(frozen=True)
class StepPlan:
    """What a host decided about the step.

    Args:
        groups: the same number, in the same order, on every rank; a group may have no param here. A param that is in no
            group is not updated.
        choice: the inner optimizer, see `choose_inner`.
        config: clipping, zero count and non-finite policy.
        loss_scale: what the loss was multiplied with.
        stats_group: gives the ranks over which the gradient statistics are added up: all that hold a part of the model.
            Asked at every step, because a host may say it only after the optimizer is built.
        average_over: the grads arrive as sums of this many; 1 where the host averages.
        counted: by param name, see [Note: counted once].
    """

    groups: Sequence[ParamGroup]
    choice: InnerChoice
    config: DistOptConfig
    loss_scale: LossScale
    stats_group: Callable[[], Group]
    average_over: int = 1
    counted: Callable[[str], bool] = lambda name: True


class ShardedOptimizer:
    """Updates the params that this rank owns.

    It moves no params and no grads between ranks: the host reduce-scatters before `step` and all-gathers after it.

    Args:
        buffers: of all params, as this rank sees them.
        plan: see `StepPlan`.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], plan: StepPlan) -> None:
        group_of = {name: index for index, group in enumerate(plan.groups) for name in group.names}
        self.buffers = tuple(buffers)
        self.plan = plan
        #: Steps that changed nothing because a gradient was not finite.
        self.num_skipped = 0
        self.runs = build_main_runs(
            buffers, lambda name: RunKey(group_of[name], plan.counted(name)) if name in group_of else None
        )
        groups = [_as_torch_group(group, index, self.runs) for index, group in enumerate(plan.groups)]
        # torch refuses an empty list of groups, and a rank without any param still takes part in the statistics.
        self.inner = plan.choice.build(groups or [{"params": []}])

    @property
    def config(self) -> DistOptConfig:
        """The plan's."""
        return self.plan.config

    @property
    def loss_scale(self) -> LossScale:
        """The plan's."""
        return self.plan.loss_scale

    @property
    def divisor(self) -> float:
        """What the gradients in the grad buffers have to be divided by: loss scale times number of summands."""
        return self.loss_scale.value * self.plan.average_over

    @torch.no_grad()
    def step(self) -> StepResult:
        """Collective: statistics, then the update. Needs the reduced grads in this rank's shards.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise".
        """
        divisor = self.divisor
        group = self.plan.stats_group()
        stats = measure_together([self], group)
        if judge_together([self], stats, group) is Verdict.SKIP:
            return StepResult(updated=False, grad_norm=None, num_zeros=None)
        norm = stats.norm(divisor)
        self.update(divisor * clip_divisor(norm, self.config.clip_grad))
        return StepResult(updated=True, grad_norm=norm, num_zeros=stats.num_zeros)

    def attach_grads(self) -> None:
        """Gives every main param its gradient."""
        for run in self.runs:
            run.attach_grad()

    def update(self, divisor: float) -> None:
        """Divides, updates and rounds into the param buffers; the grads are let go of.

        Args:
            divisor: see `divisor`, times that of clipping.
        """
        self.advance(divisor)
        self.write_model()

    def advance(self, divisor: float) -> None:
        """The first half of `update`: the inner optimizer's step."""
        step_divided(self.inner, [run.main_grad for run in self.runs], divisor)

    def write_model(self) -> None:
        """The second half: rounds into this rank's shards of the param buffers."""
        for run in self.runs:
            run.write_model()
        self.release_grads()

    def release_grads(self) -> None:
        """Lets go of attached grads."""
        for run in self.runs:
            run.detach_grad()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Refreshes the main params after somebody else changed the model params."""
        for buffer in self.buffers:
            buffer.collect()
        for run in self.runs:
            run.read_model()

    @torch.no_grad()
    def follow_model(self) -> None:
        """`reload_model_params` for those main params alone that no longer round to their model param.

        The others keep the bits below the model's precision. It costs a pass over the main params: for the first step
        after start-up or loading, in hosts that do not say when they changed the model.
        """
        for buffer in self.buffers:
            buffer.collect()
        for run in self.runs:
            if run.differs_from_model():
                run.read_model()


def measure_together(
    optimizers: Sequence[ShardedOptimizer], group: Group, *, count_zeros: bool | None = None
) -> GradStats:
    """Collective: attaches the grads of all the optimizers and measures them with one all-reduce.

    Args:
        optimizers: of one model on this rank, e.g. one for dense and one for expert params; equal configs.
        group: all ranks that hold a part of the model.
        count_zeros: as the config says where None.
    """
    count_zeros = optimizers[0].config.count_zeros if count_zeros is None else count_zeros
    for optimizer in optimizers:
        optimizer.attach_grads()
    runs = [run for optimizer in optimizers for run in optimizer.runs]
    local = local_stats(runs, optimizers[0].loss_scale.scale.device, count_zeros=count_zeros)
    return reduce_stats(local, group, count_zeros=count_zeros)


def judge_together(optimizers: Sequence[ShardedOptimizer], stats: GradStats, group: Group) -> Verdict:
    """Collective where a gradient is not finite: what becomes of the step, the same on all ranks.

    The loss scales are moved, and the grads of a step that does not happen are let go of.

    Raises:
        NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise".
    """
    curable = not stats.is_finite and all(optimizer.loss_scale.can_back_off() for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer.loss_scale.update(found_nonfinite=not stats.is_finite)
    if stats.is_finite:
        return Verdict.UPDATE
    if not curable and optimizers[0].config.policy is not NonFinitePolicy.SKIP:
        _report_nonfinite(optimizers, group)
        return Verdict.UPDATE
    for optimizer in optimizers:
        optimizer.num_skipped += 1
    _release(optimizers)
    return Verdict.SKIP


def _report_nonfinite(optimizers: Sequence[ShardedOptimizer], group: Group) -> None:
    """Collective: says where, as an error or, where the policy is "log", as a warning."""
    runs = [run for optimizer in optimizers for run in optimizer.runs]
    names = exchange(nonfinite_params(runs), group)
    where = _some(
        [f"rank {group.global_rank(rank)}: {_some(found)}" for rank, found in enumerate(names) if found], separator="; "
    )
    if optimizers[0].config.policy is NonFinitePolicy.RAISE:
        _release(optimizers)
        remedy = (
            "Look at those params first; MEGATRON_DISTOPT_NONFINITE=skip leaves such steps out, =log goes on with them"
        )
        raise NonFiniteGradError(refusal("gradient", f"inf or nan on {where}", "be finite", remedy))
    if group.rank == 0:
        _log.warning("gradient is inf or nan on %s; the update goes on because nonfinite='log'", where)


def _release(optimizers: Sequence[ShardedOptimizer]) -> None:
    for optimizer in optimizers:
        optimizer.release_grads()


def _as_torch_group(group: ParamGroup, index: int, runs: Sequence[MainRun]) -> dict[str, object]:
    return {**group.options, "params": [run.main for run in runs if run.run.key.group == index]}


def _some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest
