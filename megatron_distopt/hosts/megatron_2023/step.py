"""What a step of the fork adds to `run_step` of optimizer/step.py: `ForkStep`.

The fork calls `reduce_model_grads`, `step`, and after a successful one `gather_model_params`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu

from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.megatron.timers import timed
from megatron_distopt.hosts.megatron_2023.buffers import UsedGrads
from megatron_distopt.hosts.megatron_2023.model import ForkModel
from megatron_distopt.hosts.watches.watched_params import params_that_left
from megatron_distopt.optimizer.main_params import MainGrads
from megatron_distopt.optimizer.step import (
    Gradients,
    HostStep,
    StepAction,
    StepDecision,
    measure,
    notice_for,
    raising,
)


def add_up_over_model_ranks(optimizer: Any, args: Any, timers: Any) -> None:
    """Collective: sums the gradients of params that several tensor- or pipeline-parallel ranks
    hold, with the methods of the fork's optimizer."""
    with timed(timers, args, "layernorm-grads-all-reduce"):
        optimizer.allreduce_layernorm_grads(args)
        # One fork has multi-query attention. The caller has to check whether its method applies.
        is_multi_query = getattr(args, "attention_head_type", None) == "multiquery"
        is_partial = (
            getattr(args, "sequence_parallel", False)
            and mpu.get_tensor_model_parallel_world_size() > 1
        )
        if is_multi_query and is_partial and hasattr(optimizer, "allreduce_key_value_grads"):
            optimizer.allreduce_key_value_grads(args)
    with timed(timers, args, "embedding-grads-all-reduce"):
        optimizer.allreduce_embedding_grads(args)


@dataclass(kw_only=True, eq=False)
class ForkStep(HostStep):
    """A step between the fork's `reduce_model_grads` and `gather_model_params`."""

    fork: ForkModel
    protection: Protection | None

    def follow_user(self) -> None:
        """Follows what the user did. Some forks load weights without reloading the main params of a
        bf16 optimizer, so the first step takes changed weights over. In later steps the main params
        win, as with the fork's own optimizer."""
        fork = self.fork
        if self.protection is not None:
            self.protection.wait_for_copy()
        fork.communication.params.finish()
        fork.members.check(fork.param_groups)
        for param in params_that_left(fork.placed_params):
            param.bring_back(with_values=fork.may_be_stale)
        fork.check_weights()
        if fork.may_be_stale:
            fork.sharded.follow_model()
            fork.written.forget()
            fork.may_be_stale = False

    def measure(self, grads: Sequence[MainGrads], found: LayoutError | None) -> Gradients:
        used = self.fork.used_grads.found
        if found is None:
            notice = notice_for(partial(UsedGrads.check, used.clone()), used, self.everyone)
        else:
            notice = notice_for(raising(found), torch.ones_like(used), self.everyone)
        measured = measure(self.optimizers, grads, self.everyone, notice)
        return Gradients(grads, measured, [self.fork.sharded.divisor])

    def follow_update(self, number: int) -> None:
        self.fork.written.forget()

    def end(self, decisions: Sequence[StepDecision]) -> None:
        if decisions[0].action is StepAction.SKIP:  # the fork does not call gather_model_params
            self.fork.used_grads.mark()
