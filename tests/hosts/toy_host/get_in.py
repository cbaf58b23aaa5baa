"""The port of the small host beside this file, by steps 3 and 4 of docs/porting.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.toy.optimizer import GradBuffer, ToyDistributedOptimizer
from torch.nn import Module

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.buffers.sharded_buffer import move_into_buffer
from megatron_distopt.checkpoint import Share, WholeModel
from megatron_distopt.comm import Group, gather_params, raise_together, reduce_grads
from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.megatron.flag import is_used
from megatron_distopt.hosts.megatron.grad_scaler import loss_scale_of
from megatron_distopt.hosts.megatron.inner_optimizers import plan_groups
from megatron_distopt.hosts.report import describe
from megatron_distopt.hosts.start import compare_ranks, named_params
from megatron_distopt.layout import ParamSlot, Placement, Span, adopt
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan
from megatron_distopt.optimizer.step import HostStep, run_step
from megatron_distopt.patch_points import substituted
from megatron_distopt.session import HostState, Session, SessionCalls
from megatron_distopt.session.announce import announce
from tests.hosts.toy_host.facts import CLASS, PATCH_POINT

# --- 3. the host's own factory runs


def build(original: Callable[..., Any], options: DistOptConfig, args: Any, model: Module) -> Any:
    if not is_used(args.use_distributed_optimizer):
        return original(args, model)
    ours = {CLASS: partial(DistributedOptimizer, options=options)}
    with substituted(original.__globals__, ours):
        return original(args, model)


# --- 4. its buffers are adopted, its calls translated


class ToyState(HostState):
    """The state of the toy host's optimizer."""

    def __init__(self, model: Module, grads: GradBuffer, base: Any, options: DistOptConfig) -> None:
        self.everyone = Group.of()
        self.named = named_params([model])
        name_of = {param: name for name, param in self.named.items()}
        slots = [
            ParamSlot(name_of[param], 0, Span(start, stop))
            for param, (start, stop) in grads.index_map.items()
        ]
        layout = adopt(
            slots,
            [Span(0, grads.data.numel())],
            num_shards=self.everyone.size,
            numel_unpadded=[grads.numel_unpadded],
        )
        choice = choose_inner(options, "cpu")
        plan = StepPlan(
            groups=plan_groups(self.named, base.param_groups, choice),
            choice=choice,
            config=options,
            loss_scale=loss_scale_of(None, torch.device("cpu")),
            stats_group=Group.of,
            average_over=self.everyone.size,
        )
        compare_ranks(self.named, plan, [(layout, grads.data.dtype)], self.everyone)
        params = move_into_buffer(self.named, layout)
        self.buffer = ShardedBuffer(layout, self.everyone.rank, grads.data, params)
        self.optimizers = [ShardedOptimizer([self.buffer], plan)]

    def whole(self) -> WholeModel:
        placements = {name: Placement(name, tuple(p.shape)) for name, p in self.named.items()}
        return WholeModel([Share(self.optimizers[0], placements)], about={"host": "toy"})

    def bring_up_to_date(self) -> None:
        """Nothing is overlapped, and nobody else writes params."""

    def begin_load(self) -> None:
        """As above."""

    def gather_written(self) -> None:
        gather_params(self.buffer, self.everyone)


class DistributedOptimizer(SessionCalls, ToyDistributedOptimizer):
    """The host's class, with the sharded step inside."""

    def __init__(self, base: Any, model: Module, grads: GradBuffer, *, options: Any) -> None:
        self.model, self.grads = model, grads
        self.stats_group = Group.of()
        self.state = raise_together(partial(ToyState, model, grads, base, options), Group.of())
        self.session = Session(self.state)
        if Group.of().rank == 0:
            sharded = self.state.optimizers
            announce(describe("toy", (PATCH_POINT,), sharded, sharded[0].device))

    def step(self) -> bool:
        (decision,) = run_step(ToyStep.of(self.state, self.session))
        return decision.updated


@dataclass(kw_only=True, eq=False)
class ToyStep(HostStep):
    """What a step of the toy host adds to `run_step`."""

    state: ToyState

    @classmethod
    def of(cls, state: ToyState, session: Session) -> ToyStep:
        return cls(
            state=state, optimizers=state.optimizers, everyone=state.everyone, hooks=session.hooks
        )

    def reduce(self) -> None:
        reduce_grads(self.state.buffer, self.everyone)

    def gather(self) -> None:
        gather_params(self.state.buffer, self.everyone)
