"""One step of the sharded optimizer in a fork's training loop, from top to bottom.

The fork calls `reduce_model_grads`, `step`, and after a successful one `gather_model_params`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron_distopt.checkpoint.digests import DigestLog
from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.between_steps import notice_for, params_that_left, raising
from megatron_distopt.hosts.megatron_2023.built import TIMERS, BuiltOptimizer, phases
from megatron_distopt.hosts.megatron_2023.grad_buffers import UsedGrads
from megatron_distopt.optimizer.deferred import Notice
from megatron_distopt.optimizer.step import StepAction, advance, decide, finish_deferred_check, measure, write_model

#: (updated, gradient norm or None, zeros or None), as the fork's.
StepOfHost = tuple[bool, float | None, int | None]


def reduce_grads(optimizer: BuiltOptimizer, args: Any, timers: Any) -> None:
    """Collective: the model-parallel sums, then the reduce-scatter; what is averaged is averaged in the step."""
    optimizer.used_grads.look()
    with optimizer.communication.watched():
        optimizer.add_up_over_model_ranks(args, timers)
    with phases(args, timers)(TIMERS.reduce_scatter):
        optimizer.communication.reduce()


@torch.no_grad()
def take_step(optimizer: BuiltOptimizer, hooks: Sequence[DigestLog], args: Any, timers: Any) -> StepOfHost:
    """Collective: measures, decides, updates and rounds into this rank's shards."""
    phase, sharded, everyone = phases(args, timers), optimizer.sharded, optimizer.everyone
    optimizer.finish_param_gather()
    notice = _look_between_steps(optimizer)
    for hook in hooks:
        hook.before()
    with phase(TIMERS.attach):
        grads = sharded.main_grads()
    with phase(TIMERS.measure):
        finish_deferred_check([sharded], everyone)
        measured = measure([sharded], [grads], everyone, notice)
        (decision,) = decide([sharded], measured, everyone)
    if decision.action is StepAction.SKIP:
        for hook in hooks:
            hook.after(decision)
        optimizer.used_grads.mark()
        return False, None, None
    with phase(TIMERS.clip):
        norm = decision.norm_to_log
    with phase(TIMERS.zeros):
        num_zeros = decision.zeros_to_log  # counted while the gradient was measured
    with phase(TIMERS.inner):
        advance(sharded, grads, decision)
    with phase(TIMERS.write):
        write_model(sharded)
    for hook in hooks:
        hook.after(decision)
    return True, norm if optimizer.clip_grad > 0 else None, num_zeros


def _look_between_steps(optimizer: BuiltOptimizer) -> Notice:
    """What the user did to params, grads and groups since the last step, and what of it has to be raised.

    Some forks load weights without telling a bf16 optimizer; it must not undo that at the first step. Afterwards
    the main params count, as with the fork's own optimizer.
    """
    used = optimizer.used_grads.found
    try:
        optimizer.members.check()
        bring_params_back(optimizer, with_values=optimizer.may_be_stale)
        if not optimizer.may_be_stale:
            optimizer.written.check()
    except LayoutError as error:
        return notice_for(raising(error), torch.ones_like(used), optimizer.everyone)
    if optimizer.may_be_stale:
        optimizer.sharded.follow_model()
        optimizer.written.forget()
        optimizer.may_be_stale = False
    return notice_for(partial(UsedGrads.check, used.clone()), used, optimizer.everyone)


def bring_params_back(optimizer: BuiltOptimizer, *, with_values: bool) -> None:
    """[Note: params that have left] in between_steps.py says why and how."""
    for param in params_that_left(optimizer.placed_params):
        param.bring_back(with_values=with_values)


@torch.no_grad()
def gather_params(optimizer: BuiltOptimizer, args: Any, timers: Any) -> None:
    """Collective: every rank gets the new params."""
    with phases(args, timers)(TIMERS.gather):
        optimizer.communication.gather()
    optimizer.used_grads.mark()
