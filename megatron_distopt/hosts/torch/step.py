"""One step: collect -> reduce -> measure -> decide -> update -> gather. Read `Stepper.step` from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.comm import CommLog, Group, exchange, profiled, raise_together, sum_over
from megatron_distopt.errors import DistOptError, LayoutError, RanksDisagreeError, refusal
from megatron_distopt.hosts.torch.census import COMMON_NUMEL, HEAD_NUMEL, Census, CensusSums, active_params
from megatron_distopt.hosts.torch.model import ShardedModel
from megatron_distopt.optimizer import (
    CapturedStep,
    GradStats,
    StepAction,
    StepDecision,
    StepResult,
    clip_divisor,
    finish_deferred_check,
    judge_together,
    measure_together,
)
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.decide import divide_deferred, measure_deferred, send_deferred
from megatron_distopt.optimizer.deferred import HostCopy
from megatron_distopt.optimizer.grad_norm import sum_with
from megatron_distopt.optimizer.graph import Record
from megatron_distopt.optimizer.inner import divides_in_place
from megatron_distopt.optimizer.torch_optimizers import IMPLEMENTATION

__all__ = ["Stepper"]


class Stepper:
    """Makes the steps of a model.

    Args:
        model: on this rank.
        torch_groups: the user's param groups, whose options count.
    """

    def __init__(self, model: ShardedModel, torch_groups: Sequence[dict[str, Any]]) -> None:
        self._model, self._torch_groups = model, torch_groups
        stats = model.ranks.stats
        self._log = CommLog(model.config.log_communication, is_first=stats.rank == 0)
        #: What ranks said in the step before, if nobody has looked at it yet.
        self._open_census: HostCopy | None = None
        self._captured: CapturedStep | None = None
        self._extra: Tensor | None = None
        model.grads.on_drop = self._announce_drop

    @torch.no_grad()
    def step(self) -> StepResult:
        """Collective.

        Raises:
            DistOptError: on all ranks, and the params are as before.
        """
        model = self._model
        gathered = model.gather.finish()
        self.settle()
        self._collect()
        reduced = model.grads.reduce(model.sharded.divisor, for_step=True)
        self._log.step(reduced, gathered)
        result = StepResult(self._decide_and_update())
        if result.may_have_updated:
            model.gather.gather()
        model.module_buffers.sync()
        model.grads.end_round()
        return result

    def capture(self, record: Record | None) -> None:
        """See `TorchDistributedOptimizer.capture_step`."""
        self._extra = self._census().packed(self._numbers())
        self._captured = CapturedStep(self._model.sharded, record, self._extra)

    def _collect(self) -> None:
        """What the user did to params and param groups since the last step."""
        model = self._model
        try:
            changed = model.params.collect()
            self.take_options()
        except LayoutError as error:
            model.grads.complaints.append(error)
        else:
            model.follow(changed | model.params.take_doubtful())

    def take_options(self) -> None:
        """The inner optimizer has the options that the user has written into the param groups."""
        inner = self._model.sharded.inner.param_groups
        self._model.check_members()
        for ours, theirs in zip(inner, self._torch_groups, strict=True):
            for key, value in theirs.items():
                if key != "params" and key not in IMPLEMENTATION:
                    ours[key] = value

    def _decide_and_update(self) -> StepDecision:
        sharded, stats_group = self._model.sharded, self._model.ranks.stats
        finish_deferred_check([sharded], stats_group)
        if self._is_deferred:
            return self._decide_deferred()
        stats, packed = self._measure()
        sums = self._said(packed[:HEAD_NUMEL].tolist())
        if not sums.is_usual:
            self._act_on(sums)
            if sums.newcomers:
                stats, packed = self._measure()
        divisor = float(self._model.grads.divisor)
        step_decision = judge_together([sharded], stats, stats_group)
        clipped = divisor * clip_divisor(stats.norm(divisor), self._model.config.clip_grad)
        decision = StepDecision(step_decision, stats, divisor, clipped)
        if step_decision is StepAction.UPDATE:
            self._update(decision, packed)
        return decision

    @property
    def _is_deferred(self) -> bool:
        """Whether the CPU learns later what was decided. A param that may begin to train has to be known at once."""
        return self._model.sharded.defers_check and not self._model.may_grow

    def _update(self, decision: StepDecision, packed: Tensor) -> None:
        model = self._model
        self._leave_out_absent(packed)
        model.sharded.update(decision.divisor, decision.found_inf)
        model.grads.updated(decision.divisor, in_place=divides_in_place(model.sharded.inner))

    def _leave_out_absent(self, packed: Tensor) -> None:
        """A param without a gradient on any rank is left alone; one with a gradient somewhere has one everywhere."""
        grads = self._model.grads
        if all(grads.present):
            return
        active = active_params(packed)
        grads.settle(active)
        self._model.sharded.leave_out(
            {slot.name for slot, is_active in zip(grads.slots, active, strict=True) if not is_active}
        )

    def _measure(self) -> tuple[GradStats, Tensor]:
        """Collective: statistics and census of all ranks, in one all-reduce where every rank holds the whole model."""
        model, packed = self._model, self._census().packed(self._numbers())
        ranks = model.ranks
        extra = packed if ranks.are_one else packed[:COMMON_NUMEL]
        with profiled("measure gradients"):
            stats = measure_together([model.sharded], ranks.stats, extra=extra)
            if not ranks.are_one:
                _sum_flags(packed, ranks.data)
        return stats, packed

    def _numbers(self) -> Tensor:
        """Of the dtype and device of statistics."""
        device = self._model.device
        return torch.empty((), dtype=stats_dtype(device), device=device)

    def _announce_drop(self) -> None:
        """Collective, as a step is, so that a rank which makes one meanwhile meets the others here.

        Raises:
            RanksDisagreeError: on all ranks.
        """
        ranks, packed = self._model.ranks, self._census(is_dropped=True).packed(self._numbers())
        sum_with(packed.new_zeros(3), packed if ranks.are_one else packed[:COMMON_NUMEL], ranks.stats)
        if not ranks.are_one:
            _sum_flags(packed, ranks.data)
        if not self._said(packed[:HEAD_NUMEL].tolist()).is_one_round:
            raise _in_different_rounds(self._model.grads.num_rounds, ranks.stats, is_dropped=True)

    def _census(self, *, is_dropped: bool = False) -> Census:
        model = self._model
        return Census(
            round=model.grads.num_rounds,
            complaints=len(model.grads.complaints),
            newcomers=len(model.newcomers()),
            begun=len(model.module_buffers.begun()),
            kept=model.grads.kept,
            present=model.grads.present,
            is_dropped=is_dropped,
        )

    def _said(self, head: Sequence[float]) -> CensusSums:
        return CensusSums(head, self._model.ranks.stats.size, self._model.ranks.data.size)

    def _act_on(self, sums: CensusSums) -> None:
        """Collective: what is not as in every other step."""
        model, stats_group = self._model, self._model.ranks.stats
        if not sums.is_one_round:
            raise _in_different_rounds(model.grads.num_rounds, stats_group)
        if not sums.keeps_the_same:
            raise _kept_on_some(model.grads.kept, model.ranks.data)
        if sums.complaints:
            self._raise_complaints()
        if sums.begun:
            model.module_buffers.learn(model.module_buffers.begun())
        if sums.newcomers:
            model.sharded.release_grads()
            model.grow(model.newcomers())

    def _raise_complaints(self) -> None:
        """Collective: raises on all ranks what one of them found."""
        complaints: list[DistOptError] = self._model.grads.complaints
        self._model.sharded.release_grads()

        def check() -> None:
            first = complaints[0] if complaints else None
            complaints.clear()
            if first is not None:
                raise first

        raise_together(check, self._model.ranks.stats, "step")

    def _decide_deferred(self) -> StepDecision:
        """The same where the CPU waits for nothing; what is not as usual is acted upon in the next step."""
        model, sharded = self._model, self._model.sharded
        packed = self._census().packed(self._numbers())
        if self._captured is not None and all(model.grads.present) and model.grads.divisor == sharded.divisor:
            return self._replay(self._captured, packed)
        ranks = model.ranks
        with profiled("measure gradients"):
            numbers = measure_deferred([sharded], ranks.stats, packed if ranks.are_one else packed[:COMMON_NUMEL])
            if not ranks.are_one:
                _sum_flags(packed, ranks.data)
        self._open_census = HostCopy(packed[:HEAD_NUMEL])
        divisor = float(model.grads.divisor)
        late = send_deferred([sharded], numbers)
        decision = StepDecision(
            StepAction.UPDATE, late, divisor, *divide_deferred(sharded, numbers, model.config.clip_grad, divisor)
        )
        self._update(decision, packed)
        return decision

    def _replay(self, captured: CapturedStep, packed: Tensor) -> StepDecision:
        if self._extra is None or self._extra.shape != packed.shape:
            self.capture(captured.record)
        assert self._extra is not None, "capture() makes it"
        self._extra.copy_(packed)
        decision = captured.decide()
        self._open_census = HostCopy(self._extra[:HEAD_NUMEL])
        self._model.grads.updated(decision.divisor, in_place=divides_in_place(self._model.sharded.inner))
        return decision

    def settle(self) -> None:
        """Collective where ranks said something unusual in the last step and nobody has looked at it."""
        census, self._open_census = self._open_census, None
        if census is not None:
            sums = self._said(census.values)
            if not sums.is_usual:
                self._act_on(sums)


def _sum_flags(packed: Tensor, data: Group) -> None:
    """Collective: ranks of other data-parallel groups have other params."""
    flags = packed[COMMON_NUMEL:].clone()
    sum_over(flags, data)
    packed[COMMON_NUMEL:] = flags


def _in_different_rounds(own: int, group: Group, *, is_dropped: bool = False) -> RanksDisagreeError:
    """Collective: the error that says which rank is where."""
    said = exchange((own, is_dropped), group)
    rounds = [each for each, _ in said]
    if len(set(rounds)) == 1:
        ranks = ", ".join(str(group.global_rank(rank)) for rank, (_, dropped) in enumerate(said) if dropped)
        got = f"made on other ranks while rank {ranks} cleared the gradients of round {own + 1}"
        remedy = "Call step() and zero_grad() on all ranks alike"
        return RanksDisagreeError(refusal("step", got, "be made on all ranks or on none", remedy))
    usual = max(set(rounds), key=rounds.count)
    odd = next(rank for rank, each in enumerate(rounds) if each != usual)
    one, other = group.global_rank(odd), group.global_rank(rounds.index(usual))
    got = f"rank {one} is in round {rounds[odd] + 1} of gradients where rank {other} is in {usual + 1}"
    rule, remedy = "be in the same one on all ranks", "Call step() on all ranks after each backward, or on none"
    return RanksDisagreeError(refusal("step", got, rule, remedy))


def _kept_on_some(own: int, group: Group) -> RanksDisagreeError:
    """Collective: the error that says which rank went on with other gradients."""
    kept = exchange(own, group)
    usual = max(set(kept), key=kept.count)
    odd = next(rank for rank, each in enumerate(kept) if each != usual)
    one, other = group.global_rank(odd), group.global_rank(kept.index(usual))
    got, rule = (
        f"cleared on rank {one} otherwise than on rank {other} after they were summed",
        "be cleared on all alike",
    )
    return RanksDisagreeError(refusal("gradients", got, rule, "Call optimizer.zero_grad() on all ranks, or on none"))
