"""What happens once between the constructors and the first step: ranks are compared, and rank 0 says what is active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.comm import Group
from megatron_distopt.hosts.megatron_core.facts import CLASS_POINT, PATCH_POINT
from megatron_distopt.hosts.report import announce, describe
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.step import StepDecision


@dataclass(frozen=True)
class PreparedStep:
    """The main grads of one optimizer and what was decided about its step, before the update."""

    grads: Sequence[Tensor]
    decision: StepDecision


class OneOptimizer(Protocol):
    """What a step needs of each optimizer of a chain."""

    config: Any
    ddp_config: Any
    model_chunks: list[Any]
    sharded: ShardedOptimizer
    named: Mapping[str, Parameter]
    #: Whether ranks were compared.
    is_started: bool
    #: Norm groups of any rank, see norm_groups.py.
    norm_groups: tuple[str, ...]
    #: What `prepare_grads` measured and decided, until the update; None before it.
    prepared: PreparedStep | None

    def check_between_steps(self) -> None:
        """Raises LayoutError where params or groups are not as they have to be."""

    def check_start_up(self) -> None:
        """Collective: raises where ranks disagree."""

    def is_duplicate(self, name: str) -> bool:
        """Whether another rank counts the param of that name."""

    def get_loss_scale(self) -> Tensor:
        """fp32 [1]."""

    @property
    def stats_group(self) -> Group:
        """All ranks that hold a part of the model."""


def start_together(optimizers: Sequence[OneOptimizer]) -> None:
    """Collective: compares ranks, for those of the optimizers of which that was not done yet.

    Raises:
        RanksDisagreeError, LayoutError: on all ranks.
    """
    waiting = [each for each in optimizers if not each.is_started]
    for each in waiting:
        each.check_start_up()
        each.is_started = True
    if waiting and Group.of().rank == 0:
        device = waiting[0].get_loss_scale().device
        announce(describe("megatron-core", (PATCH_POINT, CLASS_POINT), [each.sharded for each in waiting], device))
