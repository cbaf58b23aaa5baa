"""One step: collect -> reduce -> measure -> decide -> update -> gather. Read `Stepper.step` from top to bottom.

[Note: census] In the all-reduce of the gradient statistics the ranks also tell each other which params have a gradient,
in which round of gradients they are, and whether one of them has something to raise or to learn. So all of them act on
it in the same step, and it costs no collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.digests import DigestLog
from megatron_distopt.comm import CommLog, Group, exchange, raise_together, sum_over
from megatron_distopt.errors import DistOptError, LayoutError, RanksDisagreeError, refusal
from megatron_distopt.hosts.torch.model import Ranks, ShardedModel
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.deferred import DeferredCheck, Notice
from megatron_distopt.optimizer.grad_norm import GradStats, sum_with
from megatron_distopt.optimizer.inner import IMPLEMENTATION, divides_in_place
from megatron_distopt.optimizer.step import (
    StepAction,
    StepDecision,
    act_on_deferred_notice,
    decide,
    finish_deferred_check,
    measure,
    measure_now,
    update,
)

#: Rounds are told modulo this, so that sums of squares over thousands of ranks are exact in fp32 as well.
_MODULUS = 64
#: Numbers of a census that all ranks sum; the same with those that only ranks with the same params sum. Then follows
#: for each param whether the rank has a gradient of it.
_COMMON_NUMEL, HEAD_NUMEL = 5, 7


class Stepper:
    """Makes the steps of a model.

    Args:
        model: on this rank.
        torch_groups: the user's param groups, whose options count.
        hooks: called around each step; none without options that ask for them.
    """

    def __init__(self, model: ShardedModel, torch_groups: Sequence[dict[str, Any]], hooks: Sequence[DigestLog]) -> None:
        self._model, self._torch_groups, self._hooks = model, torch_groups, hooks
        stats = model.ranks.stats
        self._log = CommLog(model.config.log_communication, is_first=stats.rank == 0)
        model.grads.on_drop = self._announce_drop

    @torch.no_grad()
    def step(self) -> StepDecision:
        """Collective.

        Raises:
            DistOptError: on all ranks, and the params are as before.
        """
        model = self._model
        gathered = model.gather.finish()
        act_on_deferred_notice([model.sharded])
        self._collect()
        reduced = model.grads.reduce(model.sharded.divisor)
        self._log.step(reduced, gathered)
        for hook in self._hooks:
            hook.before()
        finish_deferred_check([model.sharded], model.ranks.stats)
        decision = self._decide_and_update()
        for hook in self._hooks:
            hook.after(decision)
        if decision.action is StepAction.UPDATE:
            model.grads.updated(decision.divisor, in_place=divides_in_place(model.sharded.inner))
            model.gather.gather()
        model.module_buffers.sync()
        model.grads.end_round()
        return decision

    def _collect(self) -> None:
        """Takes over what the user did to params and param groups since the last step."""
        model = self._model
        try:
            changed = model.params.collect()
            model.check_can_follow(changed)
            self.take_options()
        except LayoutError as error:
            model.grads.complaints.append(error)
        else:
            model.follow(changed | model.params.take_doubtful())

    def take_options(self) -> None:
        """Copies the options that the user has written into the param groups to the inner optimizer."""
        inner = self._model.sharded.inner.param_groups
        self._model.check_members()
        for ours, theirs in zip(inner, self._torch_groups, strict=True):
            for key, value in theirs.items():
                if key != "params" and key not in IMPLEMENTATION:
                    ours[key] = value

    def _decide_and_update(self) -> StepDecision:
        model = self._model
        measured, census = self._measure()
        divisor = float(model.grads.divisor)
        (decision,) = decide([model.sharded], measured, model.ranks.stats, divisors=[divisor])
        if decision.action is StepAction.UPDATE:
            self._leave_out_absent(census)
            update(model.sharded, decision)
        return decision

    def _measure(self) -> tuple[GradStats | DeferredCheck, Tensor]:
        """Collective: statistics and census of all ranks, in one all-reduce where every rank holds the whole model.

        A param that may begin to train has to be known at once; if one does, all are measured once more.
        """
        model = self._model
        measure_with = measure_now if model.may_grow else measure
        while True:
            num_params, packed = len(model.grads.slots), self._packed()
            measured = measure_with([model.sharded], model.ranks.stats, self._notice(packed))
            if len(model.grads.slots) == num_params:
                return measured, packed

    def _leave_out_absent(self, census: Tensor) -> None:
        """Leaves params without a gradient on any rank alone; one with a gradient somewhere gets one everywhere."""
        grads = self._model.grads
        if all(grads.present):
            return
        active = [value > 0 for value in census[HEAD_NUMEL:].tolist()]  # waits for the device
        grads.settle(active)
        self._model.sharded.leave_out(
            {slot.name for slot, is_active in zip(grads.slots, active, strict=True) if not is_active}
        )

    def _notice(self, packed: Tensor) -> Notice:
        """What the ranks tell each other; collective where they hold different params.

        There the ranks that hold the same ones sum their flags by themselves.
        """
        ranks = self._model.ranks
        if ranks.data.size == ranks.stats.size:  # every rank holds the whole model
            return Notice(packed, packed[:HEAD_NUMEL], self._act_on)
        flags = packed[_COMMON_NUMEL:].clone()
        sum_over(flags, ranks.data)
        packed[_COMMON_NUMEL:] = flags
        return Notice(packed[:_COMMON_NUMEL], packed[:HEAD_NUMEL], self._act_on)

    def _packed(self, *, is_dropped: bool = False) -> Tensor:
        """What this rank says, see [Note: census]: 1-D, of the dtype and device of statistics; to be summed over ranks.

        Args:
            is_dropped: whether the round ends without a step.
        """
        model, grads = self._model, self._model.grads
        number, kept = (2 * grads.num_rounds + is_dropped) % _MODULUS, grads.kept
        found = len(grads.complaints), len(model.newcomers()), len(model.module_buffers.begun())
        numbers = [number, number**2, *found, kept, kept**2, *grads.present]
        return torch.tensor(numbers, dtype=stats_dtype(model.device)).to(model.device, non_blocking=True)

    def _announce_drop(self) -> None:
        """Collective: announces that the round ends without a step.

        It is the collective of a step, so that a rank which makes a step meanwhile meets the others here.

        Raises:
            RanksDisagreeError: on all ranks.
        """
        ranks, packed = self._model.ranks, self._packed(is_dropped=True)
        sum_with(packed.new_zeros(3), self._notice(packed).numbers, ranks.stats)
        if not _CensusSums.of(packed[:HEAD_NUMEL].tolist(), ranks).is_one_round:
            raise _in_different_rounds(self._model.grads.num_rounds, ranks.stats, is_dropped=True)

    def _act_on(self, head: Sequence[float]) -> None:
        """Does what the ranks have told each other; collective where something is not as in every other step."""
        model, stats_group, sums = self._model, self._model.ranks.stats, _CensusSums.of(head, self._model.ranks)
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

        def check() -> None:
            first = complaints[0] if complaints else None
            complaints.clear()
            if first is not None:
                raise first

        raise_together(check, self._model.ranks.stats, "step")


@dataclass(frozen=True)
class _CensusSums:
    """What all ranks said together, see [Note: census].

    Args:
        is_one_round: whether all ranks are in the same one.
        keeps_the_same: whether all ranks with the same params have kept the same gradients.
        complaints: things that have to be raised on all ranks.
        newcomers: params that were frozen or new, and have a gradient now.
        begun: modules whose buffers have begun to change.
    """

    is_one_round: bool
    keeps_the_same: bool
    complaints: int
    newcomers: int
    begun: int

    @classmethod
    def of(cls, head: Sequence[float], ranks: Ranks) -> _CensusSums:
        """Reads the first `HEAD_NUMEL` sums of what `Stepper._packed` returned.

        Ranks have said the same number where the mean of its squares is the square of its mean.
        """
        total, squares, complaints, newcomers, begun, kept, squares_of_kept = map(int, head)
        is_one_round = ranks.stats.size * squares == total**2
        return cls(is_one_round, ranks.data.size * squares_of_kept == kept**2, complaints, newcomers, begun)


def _in_different_rounds(own: int, group: Group, *, is_dropped: bool = False) -> RanksDisagreeError:
    """Collective: makes the error that says which rank is in which round."""
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
    """Collective: makes the error that says which rank went on with other gradients."""
    kept = exchange(own, group)
    usual = max(set(kept), key=kept.count)
    odd = next(rank for rank, each in enumerate(kept) if each != usual)
    one, other = group.global_rank(odd), group.global_rank(kept.index(usual))
    got, rule = (
        f"cleared on rank {one} otherwise than on rank {other} after they were summed",
        "be cleared on all alike",
    )
    return RanksDisagreeError(refusal("gradients", got, rule, "Call optimizer.zero_grad() on all ranks, or on none"))
