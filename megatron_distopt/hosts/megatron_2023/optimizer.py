"""The sharded optimizer with the methods of the DistributedOptimizer of the forks of 2023.

The fork's training loop drives it: `reduce_model_grads`, `step`, and after a successful one `gather_model_params`. It
is a subclass of the fork's own class, whose reductions over tensor- and pipeline-parallel groups it uses, and does not
run that class's constructor, which knows CUDA tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.errors import HostError, LayoutError, refusal
from megatron_distopt.hosts.between_steps import not_copied, notice_for, params_that_left, raising
from megatron_distopt.hosts.megatron_2023.built import TIMERS, BuiltOptimizer, phases
from megatron_distopt.hosts.megatron_2023.checkpoint import CheckpointCalls
from megatron_distopt.hosts.megatron_2023.facts import HostRange
from megatron_distopt.hosts.megatron_2023.resplit import shards_of
from megatron_distopt.hosts.megatron_2023.used_grads import UsedGrads
from megatron_distopt.optimizer.deferred import Notice
from megatron_distopt.optimizer.step import (
    StepAction,
    advance,
    clip_divisor,
    decide,
    finish_deferred_check,
    measure,
    measure_now,
    write_model,
)

#: (updated, gradient norm or None, zeros or None), as the fork's.
StepOfHost = tuple[bool, float | None, int | None]


class DistributedOptimizer(BuiltOptimizer):
    """Collective: the fork's class, with the sharded step inside. Its arguments are those of `BuiltOptimizer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoints = CheckpointCalls(self)

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Collective: the model-parallel sums, then the reduce-scatter; what is averaged is averaged in `step`.

        Args:
            args: of the fork.
            timers: of the fork.
        """
        self._used.look()
        with self.communication.watched():
            self._add_up_over_model_ranks(args, timers)
        with phases(args, timers)(TIMERS.reduce_scatter):
            self.communication.reduce()

    @torch.no_grad()
    def step(self, args: Any = None, timers: Any = None) -> StepOfHost:
        """Collective: measures, updates and rounds into this rank's shards; after `reduce_model_grads`.

        Returns:
            (True, gradient norm, zeros or None); the norm is None without clipping. (False, None, None) where the step
            was skipped.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise"; one step later
                where the check is deferred, see `ShardedOptimizer.defers_check`. Norm and zeros are then 0-D tensors.
            LayoutError, RanksDisagreeError: on all ranks, where params, grads or groups are not as they have to be on
                one of them; deferred as well.
            HostError: it was given a closure.
        """
        _check_no_closure(args)
        phase, sharded = phases(args, timers), self.sharded
        self.finish_param_gather()
        notice, hooks = self._look_between_steps(), self._checkpoints.hooks
        for hook in hooks:
            hook.before()
        with phase(TIMERS.attach):
            grads = sharded.main_grads()
        with phase(TIMERS.measure):
            finish_deferred_check([sharded], self.everyone)
            measured = measure([sharded], [grads], self.everyone, notice)
            (decision,) = decide([sharded], measured, self.everyone)
        if decision.action is StepAction.SKIP:
            for hook in hooks:
                hook.after(decision)
            self._used.mark()
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
        return True, norm if self.clip_grad > 0 else None, num_zeros

    def _look_between_steps(self) -> Notice:
        """What the user did to params, grads and groups since the last step, and what of it has to be raised.

        Some forks load weights without telling a bf16 optimizer; it must not undo that at the first step. Afterwards
        the main params count, as with the fork's own optimizer.
        """
        try:
            self._members.check()
            self._bring_params_back(with_values=self._may_be_stale)
            if not self._may_be_stale:
                self.written.check()
        except LayoutError as error:
            return notice_for(raising(error), torch.ones_like(self._used.found), self.everyone)
        if self._may_be_stale:
            self.sharded.follow_model()
            self.written.forget()
            self._may_be_stale = False
        found = self._used.found
        return notice_for(partial(UsedGrads.check, found.clone()), found, self.everyone)

    def _bring_params_back(self, *, with_values: bool) -> None:
        """See [Note: params that have left] in between_steps.py."""
        for each in params_that_left(self._placed):
            each.bring_back(with_values=with_values)

    @torch.no_grad()
    def gather_model_params(self, args: Any = None, timers: Any = None) -> None:
        """Collective: every rank gets the new params.

        Args:
            args: of the fork.
            timers: of the fork.
        """
        with phases(args, timers)(TIMERS.gather):
            self.communication.gather()
        self._used.mark()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops `param.grad`, or zeroes it. The fork zeroes its own grad buffers; the others are zeroed here.

        Collective where the reduce-scatter overlaps with backward, backward ran and no step followed.
        """
        for param in self.start.named.values():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self.communication.drop()

    def get_loss_scale(self) -> Tensor:
        """fp32 [1]."""
        return self.sharded.loss_scale.scale

    def reload_model_params(self) -> None:
        """Refreshes the main params after the model params were changed.

        One child calls it after every resume; main params that still round to the model's are more precise and stay.
        """
        self.finish_param_gather()
        self._bring_params_back(with_values=True)
        self.sharded.follow_model()
        self.written.forget()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise not_copied("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickled")

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """The main grads that are in the norm; after `reduce_model_grads`."""
        pairs = zip(self.sharded.flat_params, self.sharded.main_grads(), strict=True)
        return [grad for flat, grad in pairs if not flat.plan.key.excluded_from_norm]

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Collective: scales the reduced gradients in the grad buffers; `step` clips by itself.

        Returns:
            The norm before clipping, of the averaged and unscaled gradient.
        """
        stats = measure_now([self.sharded], [self.sharded.main_grads()], self.everyone)
        norm = stats.norm(self.sharded.divisor)
        for flat in self.sharded.flat_params:
            flat.grad.div_(clip_divisor(norm, clip_grad))
        return norm

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Collective: zeros of the whole reduced gradient."""
        grads = [self.sharded.main_grads()]
        stats = measure_now([self.sharded], grads, self.everyone, count_zeros=True)
        return stats.num_zeros or 0

    def get_model_parallel_group(self) -> None:
        """None: statistics are added up over all ranks."""

    def get_model_param_range_map(self, param: Parameter) -> Mapping[str, HostRange]:
        """Which elements of a model param this rank owns, in the fork's three index spaces.

        Returns:
            {"gbuf_world": in the whole buffer, "gbuf_local": in this rank's shard of the param's bucket, "param"}.

        Raises:
            KeyError: this rank owns nothing of it.
        """
        name = next(name for name, each in self.start.named.items() if each is param)
        _, shard = shards_of(self.sharded)[name]
        spans = {"gbuf_world": shard.in_buffer, "gbuf_local": shard.in_shard, "param": shard.in_param}
        return {key: HostRange(span.start, span.stop) for key, span in spans.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `CheckpointCalls.state_dict`."""
        return self._checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *unused: Any) -> None:
        """Collective: see `CheckpointCalls.load_state_dict`; one child gives the iteration, too."""
        self._checkpoints.load_state_dict(state_dict)

    def save_parameter_state(self, filename: str) -> None:
        """Collective: see `CheckpointCalls.save_parameter_state`."""
        self._checkpoints.save_parameter_state(filename)

    def load_parameter_state(self, filename: str) -> None:
        """Collective: see `CheckpointCalls.load_parameter_state`."""
        self._checkpoints.load_parameter_state(filename)


def _check_no_closure(args: Any) -> None:
    if callable(args):
        rule, remedy = "get the fork's arguments and timers", "Compute the loss before it, and call step(args, timers)"
        raise HostError(refusal("step", "a closure", rule, remedy))
