"""The sharded optimizer with the methods of the DistributedOptimizer of the forks of 2023.

The fork's training loop drives it: `reduce_model_grads`, `step`, and after a successful one `gather_model_params`. It
is a subclass of the fork's own class, whose reductions over tensor- and pipeline-parallel groups it uses, and does not
run that class's constructor, which knows CUDA tensors by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
from megatron import get_args
from megatron.core import mpu
from megatron.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer
from megatron.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import (
    Field,
    Group,
    allow_shared_memory,
    compare,
    exchange,
    raise_together,
    try_collectives,
)
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import HostError, LayoutError, refusal
from megatron_distopt.hosts.base import StartUp, compare_ranks, timed
from megatron_distopt.hosts.between_steps import (
    GroupMembers,
    PlacedParam,
    not_copied,
    notice_for,
    params_that_left,
    raising,
)
from megatron_distopt.hosts.megatron_2023.buffers import main_grads, take_over
from megatron_distopt.hosts.megatron_2023.checkpoint import CheckpointCalls
from megatron_distopt.hosts.megatron_2023.communication import Communication
from megatron_distopt.hosts.megatron_2023.facts import GATHERS_STATE, PARSER, PATCH_POINT, HostRange, StepTimers
from megatron_distopt.hosts.megatron_2023.resplit import shards_of
from megatron_distopt.hosts.megatron_2023.start import Request, Start, plan_start
from megatron_distopt.hosts.megatron_2023.used_grads import UsedGrads
from megatron_distopt.hosts.report import announce, describe, sharded_over
from megatron_distopt.hosts.watch import Watch
from megatron_distopt.optimizer import (
    Notice,
    ShardedOptimizer,
    StepAction,
    advance,
    clip_divisor,
    decide,
    finish_deferred_check,
    is_torchs,
    measure,
    measure_now,
    write_model,
)
from megatron_distopt.optimizer.accelerator import stats_dtype

__all__ = ["DistributedOptimizer"]

_NAMES = StepTimers()
#: Where the state is kept, as the start-up block says it.
_FILES = {"distopt": "a folder that loads at any size", "gathered": "state gathered into one file"}
_PER_RANK_FILES = "state in every rank's file"
#: (updated, gradient norm or None, zeros or None), as the fork's.
StepOfHost = tuple[bool, float | None, int | None]


class DistributedOptimizer(HostDistributedOptimizer):
    """Collective: the fork's class, with the sharded step inside.

    Args:
        optimizer: the fork's base optimizer over model params; only its class, hyperparameters and groups are taken.
        clip_grad: largest gradient norm; 0 for no clipping.
        log_num_zeros_in_grad: count zeros at every step.
        params_have_main_grad: kept for the fork; always so with contiguous buffers.
        use_contiguous_buffers_in_local_ddp: must be set.
        fp16, bf16, params_dtype: kept for the fork; every param keeps its own dtype.
        grad_scaler: the fork's, or None.
        models: chunks, wrapped by the fork's local DistributedDataParallel.
        options: ours; None for what the fork's arguments and MEGATRON_DISTOPT_* variables say.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before anything is moved or trained.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip_grad: float,
        log_num_zeros_in_grad: bool,
        params_have_main_grad: bool,
        use_contiguous_buffers_in_local_ddp: bool,
        fp16: bool,
        bf16: bool,
        params_dtype: torch.dtype,
        grad_scaler: Any,
        models: Sequence[Module],
        *,
        options: DistOptConfig | None = None,
    ) -> None:
        self.everyone = Group.of()
        request = Request(optimizer, clip_grad, log_num_zeros_in_grad, grad_scaler, models, options)
        decided = raise_together(lambda: plan_start(request, self.everyone), self.everyone)
        # Ranks try collectives with these options; the rest of what is compared is not known yet.
        compare([Field("options", decided.plan.config.described())], self.everyone)
        for group in dict.fromkeys((decided.data, *(buffer.group for buffer in decided.buffers))):
            allow_shared_memory(group, decided.plan.config.shared_memory)
        raise_together(lambda: try_collectives(decided.device, decided.data, decided.how), self.everyone)
        start = raise_together(decided.overlapping, self.everyone)
        MegatronOptimizer.__init__(
            self,
            optimizer,
            clip_grad,
            log_num_zeros_in_grad,
            params_have_main_grad,
            use_contiguous_buffers_in_local_ddp,
            models,
        )
        self.start = start.in_buckets(self._late_params(start))
        self._compare_ranks(self.start)
        self.grad_buffers = [take_over(plan, models) for plan in self.start.buffers]
        sharded = [each for buffer in self.grad_buffers for each in buffer.sharded]
        self.sharded = ShardedOptimizer(sharded, self.start.plan)
        self.optimizer = self.sharded.inner
        self.communication = Communication(self.start, self.grad_buffers, models, self.everyone)
        self.grad_scaler, self.fp16, self.bf16, self.params_dtype = grad_scaler, fp16, bf16, params_dtype
        #: What the fork's own optimizer keeps in its param groups, for checkpoints that the fork reads.
        self.host_groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.host_is_torchs = is_torchs(optimizer)
        self._checkpoints = CheckpointCalls(self)
        self._may_be_stale = True
        self._placed = [PlacedParam(name, param) for name, param in self.start.named.items()]
        self._members = GroupMembers(self.optimizer)
        numbers = torch.empty((), dtype=stats_dtype(self.sharded.device), device=self.sharded.device)
        self._used = UsedGrads([buffer.grad for buffer in self.grad_buffers], numbers)
        if self.everyone.rank == 0:
            self._announce()

    def _late_params(self, start: Start) -> frozenset[str]:
        """Collective: to whose gradients the fork adds after backward, tried on zeros where any rank has buckets."""
        if not any(exchange(start.overlap.bucket_size is not None, self.everyone)):
            return frozenset()
        found: set[str] = set()
        grads = {name: grad for plan in start.buffers for name, grad in main_grads(plan.params).items()}
        with Watch(grads, found.add, writes_only=True):
            self._add_up_over_model_ranks(get_args(), None)
        return frozenset().union(*exchange(found, start.data))

    def _compare_ranks(self, start: Start) -> None:
        layouts = [buffer.layout for buffer in start.buffers]
        dtypes = [dtype_name(buffer.dtype) for buffer in start.buffers]
        host_options = (f"gathers_state={self.gathers_state}",)
        compare_ranks(StartUp(start.named, start.plan, layouts, dtypes, host_options), start.data, self.everyone)

    def _announce(self) -> None:
        kind = (
            f"gathered file, {_FILES[self.sharded.config.checkpoint_format]}"
            if self.gathers_state
            else f"per-rank files, {_PER_RANK_FILES}"
        )
        sharded = sharded_over(self.start.device, self.start.data, self.start.how)
        groups = f"groups     {self.everyone.size} ranks, {sharded}"
        more = (groups, f"overlap    {self.start.overlap}", f"files      {kind}")
        announce(describe("a Megatron of 2023", (PATCH_POINT, PARSER), [self.sharded], self.start.device, *more))

    @property
    def gathers_state(self) -> bool:
        """Gathered file rather than per-rank files: whether the fork keeps optimizer state in one gathered file."""
        return hasattr(HostDistributedOptimizer, GATHERS_STATE)

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Collective: the model-parallel sums, then the reduce-scatter; what is averaged is averaged in `step`.

        Args:
            args: of the fork.
            timers: of the fork.
        """
        self._used.look()
        with self.communication.watched():
            self._add_up_over_model_ranks(args, timers)
        with _phases(args, timers)(_NAMES.reduce_scatter):
            self.communication.reduce()

    def _add_up_over_model_ranks(self, args: Any, timers: Any) -> None:
        """Collective: what tensor- and pipeline-parallel ranks hold twice."""
        phase = _phases(args, timers)
        with phase(_NAMES.layernorm):
            self.allreduce_layernorm_grads(args)
            if self._must_add_up_key_values(args):
                self.allreduce_key_value_grads(args)
        with phase(_NAMES.embedding):
            self.allreduce_embedding_grads(args)

    def _must_add_up_key_values(self, args: Any) -> bool:
        """One child has multi-query attention; its method relies on its callers to ask whether it is to be called."""
        is_multi_query = getattr(args, "attention_head_type", None) == "multiquery"
        is_partial = getattr(args, "sequence_parallel", False) and mpu.get_tensor_model_parallel_world_size() > 1
        return is_multi_query and is_partial and hasattr(self, "allreduce_key_value_grads")

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
        phase, sharded = _phases(args, timers), self.sharded
        self.finish_param_gather()
        notice = self._look_between_steps()
        with phase(_NAMES.attach):
            sharded.attach_grads()
        with phase(_NAMES.measure):
            finish_deferred_check([sharded], self.everyone)
            measured = measure([sharded], self.everyone, notice)
            (decision,) = decide([sharded], measured, self.everyone)
        if decision.action is StepAction.SKIP:
            self._used.mark()
            return False, None, None
        with phase(_NAMES.clip):
            norm = decision.norm_to_log
        with phase(_NAMES.zeros):
            num_zeros = decision.zeros_to_log  # counted while the gradient was measured
        with phase(_NAMES.inner):
            advance(sharded, decision.divisor, decision.found_inf)
        with phase(_NAMES.write):
            write_model(sharded)
        return True, norm if self.clip_grad > 0 else None, num_zeros

    def _look_between_steps(self) -> Notice:
        """What the user did to params, grads and groups since the last step, and what of it has to be raised.

        Some forks load weights without telling a bf16 optimizer; it must not undo that at the first step. Afterwards
        the main params count, as with the fork's own optimizer.
        """
        try:
            self._members.check()
            self._bring_params_back(with_values=self._may_be_stale)
        except LayoutError as error:
            return notice_for(raising(error), torch.ones_like(self._used.found), self.everyone)
        if self._may_be_stale:
            self.sharded.follow_model()
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
        with _phases(args, timers)(_NAMES.gather):
            self.communication.gather()
        self._used.mark()

    def finish_param_gather(self) -> None:
        """With --distopt-overlap-param-gather: until all params are there.

        To be called before code outside of a forward pass reads or changes them. The model's `state_dict()` and the
        calls of this optimizer do it by themselves.
        """
        self.communication.finish_gather()

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

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise not_copied("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickled")

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """The main grads that are in the norm, while they are attached."""
        return [flat.main_grad for flat in self.sharded.flat_params if not flat.plan.key.excluded_from_norm]

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Collective: scales the reduced gradients in the grad buffers; `step` clips by itself.

        Returns:
            The norm before clipping, of the averaged and unscaled gradient.
        """
        stats = measure_now([self.sharded], self.everyone)
        self.sharded.release_grads()
        norm = stats.norm(self.sharded.divisor)
        for flat in self.sharded.flat_params:
            flat.grad.div_(clip_divisor(norm, clip_grad))
        return norm

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Collective: zeros of the whole reduced gradient."""
        stats = measure_now([self.sharded], self.everyone, count_zeros=True)
        self.sharded.release_grads()
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

    def names_as_registered(self) -> list[str]:
        """Names of the params in grad buffers, in the order of the fork's index maps."""
        maps = [spans for model in self.models for spans in model._grad_buffer_param_index_map.values()]
        name_of = {param: name for name, param in self.start.named.items()}
        return [name_of[param] for spans in maps for param in spans if param in name_of]

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


def _phases(args: Any, timers: Any) -> Callable[[str], AbstractContextManager[None]]:
    """From a name to the fork's timer of that name."""
    return partial(timed, timers, barrier=getattr(args, "barrier_with_L1_time", False))
