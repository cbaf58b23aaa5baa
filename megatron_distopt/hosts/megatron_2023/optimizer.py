"""The sharded optimizer with the methods of the DistributedOptimizer of the forks of 2023.

The fork's training loop drives it: `reduce_model_grads`, `step`, and after a successful one `gather_model_params`. It
is a subclass of the fork's own class, whose reductions over tensor- and pipeline-parallel groups it uses, and does not
run that class's constructor, which knows CUDA tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.errors import HostError
from megatron_distopt.hosts.between_steps import not_copied
from megatron_distopt.hosts.megatron_2023.built import BuiltOptimizer
from megatron_distopt.hosts.megatron_2023.checkpoint import ForkCheckpoints
from megatron_distopt.hosts.megatron_2023.fork_files import shards_of
from megatron_distopt.hosts.megatron_2023.forks import HostRange
from megatron_distopt.hosts.megatron_2023.step import (
    StepOfHost,
    bring_params_back,
    gather_params,
    reduce_grads,
    take_step,
)
from megatron_distopt.optimizer.step import clip_divisor, measure_now


class DistributedOptimizer(BuiltOptimizer):
    """Collective: the fork's class, with the sharded step inside. Its arguments are those of `BuiltOptimizer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoints = ForkCheckpoints(self)

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Collective: the model-parallel sums, then the reduce-scatter; what is averaged is averaged in `step`."""
        reduce_grads(self, args, timers)

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
        if callable(args):
            raise HostError(
                "step was given a closure, and takes the fork's arguments and timers. Compute the loss before it, and "
                "call step(args, timers)."
            )
        return take_step(self, self._checkpoints.hooks, args, timers)

    def gather_model_params(self, args: Any = None, timers: Any = None) -> None:
        """Collective: every rank gets the new params."""
        gather_params(self, args, timers)

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
        bring_params_back(self, with_values=True)
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
        """What a gathered file lacks; with per-rank files all of this rank's state."""
        return self._checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *unused: Any) -> None:
        """Collective: see `ForkCheckpoints.load_state_dict`; one child gives the iteration, too."""
        self._checkpoints.load_state_dict(state_dict)

    def save_parameter_state(self, filename: str) -> None:
        """Collective: see `ForkCheckpoints.save_parameter_state`."""
        self._checkpoints.save_parameter_state(filename)

    def load_parameter_state(self, filename: str) -> None:
        """Collective: see `ForkCheckpoints.load_parameter_state`."""
        self._checkpoints.load_parameter_state(filename)
