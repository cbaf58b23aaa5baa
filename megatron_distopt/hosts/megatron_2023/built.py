"""Our optimizer as it stands over a fork's model: decided, compared over ranks, and in its buffers.

The fork's calls that make steps and files are in optimizer.py and checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron import get_args
from megatron.core import mpu
from megatron.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer
from megatron.optimizer.optimizer import MegatronOptimizer
from torch.nn import Module
from torch.optim import Optimizer

from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.comm import (
    Communicator,
    Field,
    Group,
    compare,
    exchange,
    gather_params,
    raise_together,
    reduce_grads,
)
from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.base import begin_communication, compare_ranks, timed
from megatron_distopt.hosts.between_steps import GroupMembers, PlacedParam, RemainderWatch
from megatron_distopt.hosts.megatron_2023.decisions import Start, num_microbatches_of, plan_start
from megatron_distopt.hosts.megatron_2023.forks import GATHERS_STATE, PARSER, PATCH_POINT
from megatron_distopt.hosts.megatron_2023.grad_buffers import (
    GradBuffer,
    UsedGrads,
    main_grads,
    take_over,
)
from megatron_distopt.hosts.protecting import ScriptCalls
from megatron_distopt.hosts.report import announce, describe, sharded_over
from megatron_distopt.hosts.saving import StepHook
from megatron_distopt.hosts.torch.gather import ParamGather
from megatron_distopt.hosts.watch import Watch, tell_of_grads
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.inner import is_torchs
from megatron_distopt.optimizer.sharded import ShardedOptimizer


class BuiltOptimizer(ScriptCalls, HostDistributedOptimizer):
    """Collective: an object of the fork's class that holds the sharded step instead of the fork's
    own state.

    Args:
        optimizer: the fork's base optimizer over model params; only its class, hyperparameters and
            groups are taken.
        clip_grad: largest gradient norm; 0 for no clipping.
        log_num_zeros_in_grad: count zeros at every step.
        params_have_main_grad: kept for the fork; always so with contiguous buffers.
        use_contiguous_buffers_in_local_ddp: must be set.
        fp16, bf16, params_dtype: kept for the fork; every param keeps its own dtype.
        grad_scaler: the fork's, or None.
        models: chunks, wrapped by the fork's local DistributedDataParallel.
        options: ours; None for what the fork's arguments and MEGATRON_DISTOPT_* variables say.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before anything is
            moved or trained.
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
        decided = raise_together(
            lambda: plan_start(
                optimizer, clip_grad, log_num_zeros_in_grad, grad_scaler, models, options
            ),
            self.everyone,
        )
        # Ranks try collectives with these options; the rest of what is compared is not known yet.
        compare([Field("options", decided.plan.config.described())], self.everyone)
        groups = [decided.data, *(buffer.group for buffer in decided.buffers)]
        dtypes = {
            *(buffer.dtype for buffer in decided.buffers),
            *(param.dtype for param in decided.named.values()),
        }
        begin_communication(
            decided.plan.config, decided.how, decided.device, self.everyone, groups, dtypes
        )
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
        self.start = start.in_buckets(self._params_changed_after_backward(start))
        layouts = [(buffer.layout, buffer.dtype) for buffer in self.start.buffers]
        host_options = (f"gathers_state={self.gathers_state}",)
        compare_ranks(
            self.start.named, self.start.plan, layouts, self.start.data, host_options=host_options
        )
        self.grad_buffers = [take_over(plan, models) for plan in self.start.buffers]
        sharded = [each for buffer in self.grad_buffers for each in buffer.sharded]
        self.sharded = ShardedOptimizer(sharded, self.start.plan)
        self.optimizer = self.sharded.inner
        self.communication = Communication(
            self.start, self.grad_buffers, models, self.sharded.inner
        )
        self.grad_scaler, self.fp16, self.bf16, self.params_dtype = (
            grad_scaler,
            fp16,
            bf16,
            params_dtype,
        )
        self.protection: Protection | None = None
        #: Called around each step and after a load; none without options that ask for them.
        self.hooks: Sequence[StepHook] = ()
        #: What the fork's own optimizer keeps in its param groups, for checkpoints that the fork
        #: reads.
        self.host_groups = [
            {k: v for k, v in group.items() if k != "params"} for group in start.host_groups
        ]
        self.host_is_torchs = is_torchs(optimizer)
        self.may_be_stale = True
        self.placed_params = [PlacedParam(name, param) for name, param in self.start.named.items()]
        self.members = GroupMembers(self.optimizer)
        self.written = RemainderWatch(self.sharded, self.start.named)
        numbers = torch.empty(
            (), dtype=stats_dtype(self.sharded.device), device=self.sharded.device
        )
        self.used_grads = UsedGrads([buffer.grad for buffer in self.grad_buffers], numbers)
        if self.everyone.rank == 0:
            self._announce()

    def check_weights(self) -> None:
        """Refuses weights that changed under main params that go with them."""
        if not self.may_be_stale:
            self.written.check()

    def _params_changed_after_backward(self, start: Start) -> frozenset[str]:
        """Collective: to whose gradients the fork adds after backward, tried on zeros where any
        rank has buckets."""
        if not any(exchange(start.overlap.bucket_size is not None, self.everyone)):
            return frozenset()
        found: set[str] = set()
        grads = {
            name: grad for plan in start.buffers for name, grad in main_grads(plan.params).items()
        }
        with Watch(grads, found.add):
            self.add_up_over_model_ranks(get_args(), None)
        return frozenset().union(*exchange(found, start.data))

    def _announce(self) -> None:
        if not self.gathers_state:
            own, named = (
                "the fork's own",
                "named shards, which the fork reads after convert --to per-rank",
            )
            files = f"per-rank files, {own if self.has_forks_buckets else named}"
        elif self.sharded.config.checkpoint_format == "gathered":
            files = "gathered file, state gathered into one file"
        else:
            files = "gathered file, a folder that loads at any size"
        sharded = sharded_over(self.start.device, self.start.data, self.start.how)
        groups = f"groups     {self.everyone.size} ranks, {sharded}"
        more = (groups, f"overlap    {self.start.overlap}", f"files      {files}")
        announce(
            describe(
                "a Megatron of 2023",
                (PATCH_POINT, PARSER),
                [self.sharded],
                self.start.device,
                *more,
            )
        )

    @property
    def gathers_state(self) -> bool:
        """Gathered file rather than per-rank files: whether the fork keeps optimizer state in one
        gathered file."""
        return hasattr(HostDistributedOptimizer, GATHERS_STATE)

    @property
    def has_forks_buckets(self) -> bool:
        """Whether each grad buffer is cut into shards as the fork cuts it; the same on all
        ranks."""
        return all(buffer.plan.is_in_place for buffer in self.grad_buffers)

    def add_up_over_model_ranks(self, args: Any, timers: Any) -> None:
        """Collective: what tensor- and pipeline-parallel ranks hold twice."""
        phase = phases(args, timers)
        with phase("layernorm-grads-all-reduce"):
            self.allreduce_layernorm_grads(args)
            # One child has multi-query attention; its method relies on its callers to ask whether
            # it is to be called.
            is_multi_query = getattr(args, "attention_head_type", None) == "multiquery"
            is_partial = (
                getattr(args, "sequence_parallel", False)
                and mpu.get_tensor_model_parallel_world_size() > 1
            )
            if is_multi_query and is_partial and hasattr(self, "allreduce_key_value_grads"):
                self.allreduce_key_value_grads(args)
        with phase("embedding-grads-all-reduce"):
            self.allreduce_embedding_grads(args)

    def finish_param_gather(self) -> None:
        """With --distopt-overlap-param-gather: until all params are there; until no snapshot reads
        the state.

        To be called before code outside of a forward pass reads or changes them. The model's
        `state_dict()` and the calls of this optimizer do it by themselves.
        """
        self.wait_for_snapshot()
        self.communication.params.finish()


class Communication:
    """The reduce-scatter of grads and the all-gather of params.

    Experts are owned by other ranks than the dense params. Their communication is never overlapped,
    so that ranks which share some groups and not others cannot wait for each other in different
    ones.
    """

    def __init__(
        self,
        start: Start,
        buffers: Sequence[GradBuffer],
        models: Sequence[Module],
        inner: Optimizer,
    ) -> None:
        self._how = start.how
        self._dense = [buffer for buffer in buffers if not buffer.plan.is_ours]
        self._experts = [buffer for buffer in buffers if buffer.plan.is_ours]
        named = {
            name: param for buffer in self._dense for name, param in buffer.plan.params.items()
        }
        trained = {name: param for name, param in named.items() if param.requires_grad}
        self._communicator = Communicator(
            start.data,
            start.how,
            overlap_grads=start.overlap.grads,
            overlap_params=start.overlap.params,
            num_microbatches=num_microbatches_of(),
        )
        self._communicator.add(
            [buffer.sharded[0] for buffer in self._dense],
            [sharded for buffer in self._dense for sharded in buffer.sharded],
            frozen=frozenset(named.keys() - trained.keys()),
        )
        self.params = ParamGather(self._communicator, models)
        self.params.add(named)
        self._nodes: list[object] = []
        #: Within it, the fork may change gradients after backward; from then on these are reduced
        #: afterwards.
        self.watch: AbstractContextManager[object] = nullcontext()
        if self._communicator.overlaps_grads:
            self._nodes = tell_of_grads(trained, self._communicator.grad_arrived)
            self.watch = Watch(main_grads(trained), self._communicator.defer)

    def reduce(self) -> None:
        """Collective: every rank has the sums of its shards afterwards."""
        self._communicator.finish_grads()
        # Experts too are averaged over all ranks whose tokens they saw: those of the dense params.
        for buffer in self._experts:
            reduce_grads(buffer.sharded[0], buffer.plan.group, self._how)
        self.params.finish()

    def gather(self) -> None:
        """Collective: every rank has the new params afterwards, or when it reads them."""
        for buffer in self._experts:
            for sharded in buffer.sharded:
                gather_params(sharded, buffer.plan.group)
        self.params.gather()

    def drop(self) -> None:
        """Zeroes the gradients that the fork does not zero; collective where backward ran and no
        step followed."""
        if self._communicator.has_arrived:
            self._communicator.finish_grads()
            for buffer in self._dense:
                buffer.grad.zero_()
        for buffer in self._experts:
            buffer.grad.zero_()


def phases(args: Any, timers: Any) -> Callable[[str], AbstractContextManager[None]]:
    """From a name to the fork's timer of that name."""
    return partial(timed, timers, barrier=getattr(args, "barrier_with_L1_time", False))
