"""The fork's calls that make a step, and what a step of the fork adds to `run_step` of
optimizer/step.py: `ForkStep`.

The fork calls `reduce_model_grads`, `step`, and after a successful one `gather_model_params`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo

from megatron_distopt.errors import AccessError, HostError, LayoutError
from megatron_distopt.hosts.between_steps import notice_for, params_that_left, raising
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer, phases
from megatron_distopt.hosts.megatron_2023.grad_buffers import UsedGrads
from megatron_distopt.optimizer.main_params import MainGrads
from megatron_distopt.optimizer.step import (
    Gradients,
    HostStep,
    StepAction,
    StepDecision,
    measure,
    run_step,
)


class ForkSteps(BuiltOptimizer):
    """What the optimizer answers to the fork's training loop."""

    @_disable_dynamo
    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Collective: the model-parallel sums, then the reduce-scatter; what is averaged is
        averaged in `step`."""
        self.used_grads.look()
        with self.communication.watch:
            self.add_up_over_model_ranks(args, timers)
        with phases(args, timers)("grads-reduce-scatter"):
            self.communication.reduce()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, args: Any = None, timers: Any = None) -> tuple[bool, float | None, int | None]:
        """Collective: measures, decides, updates and rounds into this rank's shards; after
        `reduce_model_grads`.

        Returns:
            (True, gradient norm, zeros or None); the norm is None without clipping. (False, None,
            None) where the step was skipped.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is
                "raise"; one step later where the check is deferred, see
                `ShardedOptimizer.defers_check`. Norm and zeros are then 0-D tensors.
            LayoutError, RanksDisagreeError: on all ranks, where params, grads or groups are not as
                they have to be on one of them; deferred as well.
            HostError: it was given a closure.
        """
        if callable(args):
            raise HostError(
                "step was given a closure, and takes the fork's arguments and timers. Compute the "
                "loss before it, and call step(args, timers)."
            )
        phase = phases(args, timers)
        step = ForkStep(
            optimizer=self,
            optimizers=[self.sharded],
            everyone=self.everyone,
            hooks=self.hooks,
            shows_inner=True,
            timer=phase,
        )
        (decision,) = run_step(step)
        if decision.action is StepAction.SKIP:
            return False, None, None
        # Both were done while the gradient was measured.
        with phase("optimizer-clip-main-grad"), phase("optimizer-count-zeros"):
            norm, num_zeros = decision.norm_to_log, decision.zeros_to_log
        return True, norm if self.clip_grad > 0 else None, num_zeros

    @_disable_dynamo
    @torch.no_grad()
    def gather_model_params(self, args: Any = None, timers: Any = None) -> None:
        """Collective: every rank gets the new params."""
        with phases(args, timers)("params-all-gather"):
            self.communication.gather()
        self.used_grads.mark()

    def reload_model_params(self) -> None:
        """Refreshes the main params after the model params were changed.

        One child calls it after every resume; main params that still round to the model's are more
        precise and stay.
        """
        self.sharded.check_has_params("reload_model_params")
        self.finish_param_gather()
        for param in params_that_left(self.placed_params):
            param.bring_back(with_values=True)
        self.sharded.follow_model()
        self.written.forget()

    def clip_grad_norm(self, *_: Any) -> NoReturn:
        """Refused, as are other parts of the fork's own step, which no fork calls by themselves."""
        raise AccessError(
            "A part of the fork's own step was called (clip_grad_norm, count_zeros, "
            "get_main_grads_for_grad_norm or get_model_param_range_map), whose tensors this "
            "optimizer does not have. Call step(args, timers), which clips by --clip-grad and "
            "returns the gradient norm, and with --log-num-zeros-in-grad the zeros."
        )

    count_zeros = get_main_grads_for_grad_norm = get_model_param_range_map = clip_grad_norm


@dataclass(kw_only=True, eq=False)
class ForkStep(HostStep):
    """A step between the fork's `reduce_model_grads` and `gather_model_params`."""

    optimizer: ForkSteps

    def follow_user(self) -> LayoutError | None:
        """Some forks load weights without telling a bf16 optimizer; it must not undo that at the
        first step. Afterwards the main params count, as with the fork's own optimizer."""
        optimizer = self.optimizer
        if optimizer.sharded.averages is not None:
            optimizer.sharded.check_has_params("step")
        optimizer.finish_param_gather()
        try:
            optimizer.members.check()
            for param in params_that_left(optimizer.placed_params):
                param.bring_back(with_values=optimizer.may_be_stale)
            if not optimizer.may_be_stale:
                optimizer.written.check()
        except LayoutError as error:
            return error
        if optimizer.may_be_stale:
            optimizer.sharded.follow_model()
            optimizer.written.forget()
            optimizer.may_be_stale = False
        return None

    def measure(self, grads: Sequence[MainGrads], found: LayoutError | None) -> Gradients:
        used = self.optimizer.used_grads.found
        if found is None:
            notice = notice_for(partial(UsedGrads.check, used.clone()), used, self.everyone)
        else:
            notice = notice_for(raising(found), torch.ones_like(used), self.everyone)
        measured = measure(self.optimizers, grads, self.everyone, notice)
        return Gradients(grads, measured, [self.optimizer.sharded.divisor])

    def follow_update(self, number: int) -> None:
        self.optimizer.written.forget()

    def end(self, decisions: Sequence[StepDecision]) -> None:
        if decisions[0].action is StepAction.SKIP:  # the fork does not gather then
            self.optimizer.used_grads.mark()
