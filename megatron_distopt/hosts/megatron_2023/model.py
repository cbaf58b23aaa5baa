"""A fork's model in our buffers, after its ranks were compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron import get_args
from megatron.core import mpu
from megatron.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer
from torch.nn import Module

from megatron_distopt.checkpoint import Share, WholeModel
from megatron_distopt.comm import Communicator, Group, gather_params, raise_together, reduce_grads
from megatron_distopt.hosts.megatron.naming import (
    FROM_WEIGHTS,
    ModelRanks,
    canonical,
    global_names,
    placement_of,
)
from megatron_distopt.hosts.megatron.saving import options_of_run
from megatron_distopt.hosts.megatron_2023.buffers import (
    GradBuffer,
    UsedGrads,
    expert_place,
    is_expert,
    main_grads,
    take_over,
)
from megatron_distopt.hosts.megatron_2023.facts import GATHERS_STATE, PARSER, PATCH_POINT, has_gates
from megatron_distopt.hosts.megatron_2023.plan import StartPlan, num_microbatches_of
from megatron_distopt.hosts.megatron_2023.watch import Watch, tell_of_grads
from megatron_distopt.hosts.report import describe, sharded_over
from megatron_distopt.hosts.start import compare_ranks
from megatron_distopt.hosts.torch.gather import ParamGather
from megatron_distopt.hosts.watches.watched_params import (
    GroupMembers,
    PlacedParam,
    RemainderWatch,
    params_that_left,
)
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.session import HostState
from megatron_distopt.session.announce import announce


class ForkModel(HostState):
    """Collective: a fork's model in our buffers, with its sharded optimizer.

    Args:
        start: the plan; it is compared over ranks before anything is moved.
        models: chunks, wrapped by the fork's local DistributedDataParallel.
        grad_scaler: the fork's, or None.
        host_is_torchs: whether the fork's base optimizer is a class of torch.
    """

    def __init__(
        self, start: StartPlan, models: Sequence[Any], grad_scaler: Any, *, host_is_torchs: bool
    ) -> None:
        self.everyone = Group.of()
        self.start, self.models, self.grad_scaler = start, models, grad_scaler
        layouts = [(buffer.layout, buffer.dtype) for buffer in start.buffers]
        host_options = (f"gathers_state={self.gathers_state}",)
        compare_ranks(start.named, start.plan, layouts, start.data, host_options=host_options)
        self.grad_buffers = [take_over(plan, models) for plan in start.buffers]
        sharded = [each for buffer in self.grad_buffers for each in buffer.sharded]
        self.sharded = ShardedOptimizer(sharded, start.plan)
        self.optimizers = [self.sharded]
        self.communication = Communication(start, self.grad_buffers, models)
        #: The options in the param groups of the fork's own optimizer, for checkpoints that the
        #: fork reads.
        self.host_groups = [
            {k: v for k, v in group.items() if k != "params"} for group in start.host_groups
        ]
        self.host_is_torchs = host_is_torchs
        self.may_be_stale = True
        self.placed_params = [PlacedParam(name, param) for name, param in start.named.items()]
        self.members = GroupMembers(self.param_groups)
        self.written = RemainderWatch(self.sharded, start.named)
        numbers = torch.empty(
            (), dtype=stats_dtype(self.sharded.device), device=self.sharded.device
        )
        self.used_grads = UsedGrads([buffer.grad for buffer in self.grad_buffers], numbers)
        if self.everyone.rank == 0:
            announce(self._described())

    def _described(self) -> str:
        if not self.gathers_state:
            own, named = (
                "the fork's own",
                "named shards, which the fork can read after convert --to per-rank",
            )
            files = f"per-rank files, {own if self.has_forks_buckets else named}"
        elif self.sharded.config.checkpoint_format == "gathered":
            files = "gathered file, with the optimizer state"
        else:
            files = "gathered file, with the optimizer state in a folder that loads at any size"
        sharded = sharded_over(self.start.device, self.start.data, self.start.how)
        groups = f"groups     {self.everyone.size} ranks, {sharded}"
        more = (groups, f"overlap    {self.start.overlap}", f"files      {files}")
        points = (PATCH_POINT, PARSER)
        return describe("a Megatron of 2023", points, [self.sharded], self.start.device, *more)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the inner optimizer."""
        return self.sharded.inner.param_groups

    @property
    def gathers_state(self) -> bool:
        """Whether the fork saves optimizer state in a gathered file and not in per-rank files."""
        return hasattr(HostDistributedOptimizer, GATHERS_STATE)

    @property
    def has_forks_buckets(self) -> bool:
        """Whether each grad buffer is cut into shards as the fork cuts it; the same on all
        ranks."""
        return all(buffer.plan.is_in_place for buffer in self.grad_buffers)

    def check_weights(self) -> None:
        """Refuses changed weights whose main params are stored as remainders of them."""
        if not self.may_be_stale:
            self.written.check()

    def reload_main_params(self) -> None:
        """Copies model params into the main params that no longer round to them."""
        for param in params_that_left(self.placed_params):
            param.bring_back(with_values=True)
        self.sharded.follow_model()
        self.written.forget()

    # --- what a session asks for

    def whole(self) -> WholeModel:
        """From attributes of the params, the fork's groups and its arguments."""
        self.sharded.check_has_params("save or load")
        named, plan = self.start.named, self.start.plan
        tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
        expert = next((expert_place(param) for param in named.values() if is_expert(param)), (0, 1))
        ranks = ModelRanks(
            tensor,
            tensor,
            expert,
            has_gates(get_args()),
            "language_model.embedding.word_embeddings.weight",
        )
        names = global_names(self.models, ranks)
        placements = {
            name: placement_of(names[param], param, ranks, is_expert=is_expert(param))
            for name, param in named.items()
        }
        frozen = frozenset(name for param, name in names.items() if not param.requires_grad)
        about = {
            "host": "a Megatron of 2023",
            "ranks": self.everyone.size,
            "data_parallel": self.start.data.size,
            "tensor_parallel": tensor[1],
            "pipeline_parallel": mpu.get_pipeline_model_parallel_world_size(),
            "expert_parallel": expert[1],
        }
        share = Share(self.sharded, placements, lambda name: not plan.excluded_from_norm(name))
        kept = options_of_run(get_args())
        return WholeModel([share], canonical, frozen, about, FROM_WEIGHTS, kept)

    def bring_up_to_date(self) -> None:
        self.communication.params.finish()
        raise_together(self.check_weights, self.everyone, "protect")

    def begin_load(self) -> None:
        self.communication.params.finish()

    def gather_written(self) -> None:
        self.written.forget()
        self.communication.gather()
        self.communication.params.finish()


class Communication:
    """The reduce-scatter of grads and the all-gather of params.

    Experts are sharded over other groups than the dense params. Their communication is never
    overlapped, because ranks that share only some groups could wait for each other in different
    ones.
    """

    def __init__(
        self, start: StartPlan, buffers: Sequence[GradBuffer], models: Sequence[Module]
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
        #: The context in which the fork changes gradients after backward. Gradients that it changes
        #: are from then on reduced after it.
        self.watch: AbstractContextManager[object] = nullcontext()
        if self._communicator.overlaps_grads:
            self._nodes = tell_of_grads(trained, self._communicator.grad_arrived)
            self.watch = Watch(main_grads(trained), self._communicator.defer)

    def reduce(self) -> None:
        """Collective: sums the gradients, so that every rank has the sums in its shards."""
        self._communicator.finish_grads()
        # Experts are averaged over the ranks of dense params, too: they saw the tokens of all.
        for buffer in self._experts:
            reduce_grads(buffer.sharded[0], buffer.plan.group, self._how)
        self.params.finish()

    def gather(self) -> None:
        """Collective: gathers the new params on every rank. With overlap, a read waits for them."""
        for buffer in self._experts:
            for sharded in buffer.sharded:
                gather_params(sharded, buffer.plan.group)
        self.params.gather()

    def drop(self) -> None:
        """Zeroes the gradients that the fork does not zero. Collective after a backward that no
        step followed."""
        if self._communicator.has_arrived:
            self._communicator.finish_grads()
            for buffer in self._dense:
                buffer.grad.zero_()
        for buffer in self._experts:
            buffer.grad.zero_()
