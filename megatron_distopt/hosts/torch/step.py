"""`TorchStep`: what a step of a torch module adds to `run_step` of optimizer/step.py.

[Note: census] With the gradient statistics the ranks also all-reduce which params have a gradient,
in which round of gradients they are, and whether one of them has an error to raise or a new param
to train. So all ranks act in the same step, and no further collective is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, cast

import torch
from torch import Tensor

from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.comm import (
    Tally,
    all_gather_objects,
    raise_together,
    sum_over,
    two_that_differ,
)
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, LayoutError, RanksDisagreeError
from megatron_distopt.hosts.torch.model import ShardedModel
from megatron_distopt.optimizer.deferred import Notice
from megatron_distopt.optimizer.grad_norm import sum_with
from megatron_distopt.optimizer.main_params import MainGrads, main_grads
from megatron_distopt.optimizer.step import (
    Gradients,
    HostStep,
    StepDecision,
    act_on_deferred_notice,
    measure,
    measure_now,
)

#: Round numbers are sent modulo this, so that sums of their squares over thousands of ranks are
#: exact in fp32.
_MODULUS = 64
#: For errors: `Grads.sum_of_hooked`.
_HOOKED = (
    "checksum of the gradients after DistributedDataParallel, whose communication hook or "
    "process_group must make them equal on all ranks,"
)


@dataclass(frozen=True)
class Census:
    """What a rank reports, see [Note: census], or the sums of it over ranks."""

    round: Tally  # of gradients
    num_complaints: float  # errors to raise
    num_to_begin: float  # params that may begin to train
    num_begun: float  # module buffers that training has begun to change
    num_apart: float  # above 0 where `alike` differs between ranks with the same params
    alike: Tally  # checksum of options and resets, equal on ranks with the same params

    def pack(self) -> list[float]:
        """The numbers in the order of `unpack`; those that all ranks sum come first."""
        return [
            *self.round,
            self.num_complaints,
            self.num_to_begin,
            self.num_begun,
            self.num_apart,
            *self.alike,
        ]

    @classmethod
    def unpack(cls, sums: Sequence[float]) -> Census:
        number, squared, complaints, params_to_begin, begun, apart, *alike = sums
        return cls(Tally(number, squared), complaints, params_to_begin, begun, apart, Tally(*alike))


#: How many numbers a census has, and how many of them, from the first, are summed over all ranks.
#: Ranks with the same params sum the others. In a tensor a flag for each param follows: whether the
#: rank has a gradient of it.
CENSUS_NUMEL, _COMMON_NUMEL = 8, 6


@dataclass(kw_only=True, eq=False)
class TorchStep(HostStep):
    """A step of a model. If it raises, it does so on all ranks and leaves the params unchanged."""

    model: ShardedModel
    protection: Protection | None

    def follow_user(self) -> None:
        """Takes over what the user did. An error is added to the complaints of the gradients, so
        that all ranks raise it."""
        model = self.model
        if self.protection is not None:
            self.protection.wait_for_copy()
        model.gather.finish()
        if model.sharded.deferred_check is not None:
            act_on_deferred_notice([model.sharded])
        try:
            model.params.follow(before_step=True)
        except (ConfigError, LayoutError) as error:
            model.grads.complaints.append(error)

    def reduce(self) -> None:
        self.model.grads.reduce()

    def reduce_ahead(self) -> None:
        """Collective: reduces gradients before the step, for calls that read them. Raises on all
        ranks what a step would raise."""
        model = self.model
        self.follow_user()
        model.grads.reduce_ahead()
        complaints = torch.tensor([float(len(model.grads.complaints))], device=model.device)
        sum_over(complaints, model.everyone)
        if complaints.item():
            raise_together(model.grads.raise_complaint, model.everyone, "step")

    def measure(self, grads: Sequence[MainGrads], found: LayoutError | None) -> Gradients:
        """Sums the gradient statistics and the census over ranks, in one all-reduce if every rank
        holds the whole model.

        If a param begins to train, all gradients are measured once more.
        """
        model = self.model
        waits = bool(model.untrained) or not model.sharded.defers_check
        measure_with = measure_now if waits else measure
        while True:
            num_params, census = len(model.grads.slots), census_of(model)
            notice = _notice(model, census)
            measured = measure_with(self.optimizers, grads, self.everyone, notice)
            if len(model.grads.slots) == num_params:
                divisors = [model.grads.divisor]
                num_present = None if all(model.grads.present) else census[CENSUS_NUMEL:]
                if num_present is not None:
                    # Also before a step that is skipped: its gradients stay and may be added to.
                    model.grads.fill_missing(_is_active(num_present))
                return Gradients(grads, measured, divisors, num_present)
            grads = [main_grads(model.sharded.flat_params)]

    def complete(self, gradients: Gradients) -> Sequence[MainGrads]:
        """Leaves params out of the update that have no gradient on any rank."""
        model, is_active = self.model, _is_active(cast(Tensor, gradients.num_present))
        if all(is_active):
            return gradients.main
        slots = zip(model.grads.slots, is_active, strict=True)
        return [model.sharded.leave_out({slot.name for slot, active in slots if not active})]

    def follow_update(self, number: int) -> None:
        self.model.params.options.sync()

    def gather(self) -> None:
        self.model.gather.gather()

    def end(self, decisions: Sequence[StepDecision]) -> None:
        if self.model.module_buffers is not None:
            # DDP may have been told not to broadcast them.
            self.model.module_buffers.sync(
                is_taken=all(each.broadcast_buffers for each in self.model.grads.ddp.used_models)
            )
        self.model.grads.end_round(decisions[0])


def _is_active(num_present: Tensor) -> list[bool]:
    """By param, whether any rank has a gradient of it; waits for the device."""
    return [count > 0 for count in num_present.tolist()]


# --- what ranks tell each other


def census_of(model: ShardedModel, *, is_dropped: bool = False) -> Tensor:
    """What this rank reports, see [Note: census]: 1-D, with the dtype and device of statistics, to
    be summed over ranks."""
    grads = model.grads
    number = (2 * grads.num_rounds + is_dropped) % _MODULUS
    # The sum of squares over 4,096 ranks is exact.
    modulus = 2**20 if model.sharded.stats_dtype is torch.float64 else _MODULUS
    salt = grads.num_rounds, grads.sum_of_hooked, grads.kept
    census = Census(
        round=Tally.of(number),
        num_complaints=len(grads.complaints),
        num_to_begin=len(model.params_to_begin()) if model.untrained else 0,
        num_begun=0 if model.module_buffers is None else len(model.module_buffers.begun()),
        num_apart=0,
        alike=Tally.of(model.params.options.checksum(salt, modulus)),
    )
    numbers = torch.tensor([*census.pack(), *grads.present], dtype=model.sharded.stats_dtype)
    is_there = model.device.type == CPU
    return numbers if is_there else numbers.to(model.device, non_blocking=True)


def _notice(model: ShardedModel, census: Tensor) -> Notice:
    """The census as a part of the statistics.

    Where ranks hold different params it is collective: the ranks that hold the same params sum
    their flags first.
    """
    common = census
    if model.data.size != model.everyone.size:
        flags = census[_COMMON_NUMEL:].clone()
        sum_over(flags, model.data)
        census[_COMMON_NUMEL:] = flags
        # computed on the device, so the CPU does not wait
        census[_COMMON_NUMEL - 1] = Tally(flags[0], flags[1]).spread(model.data.size)
        common = census[:_COMMON_NUMEL]
    return Notice(common, census[:CENSUS_NUMEL], partial(_act_on, model))


def _act_on(model: ShardedModel, sums: Sequence[float]) -> None:
    """Acts on the sums of the census: raises errors and begins to train params. Collective if there
    is anything to do."""
    census = Census.unpack(sums)
    if census.round.spread(model.everyone.size):
        _raise_rounds(model)
    if census.num_apart or census.alike.spread(model.data.size):
        raise_together(partial(_check_alike, model), model.everyone, "step")
    if census.num_complaints:
        raise_together(model.grads.raise_complaint, model.everyone, "step")
    if census.num_begun and model.module_buffers is not None:
        model.module_buffers.learn(model.module_buffers.begun())
    if census.num_to_begin:
        model.begin_training_of(model.params_to_begin())


def _check_alike(model: ShardedModel) -> None:
    """Collective: raises the first difference in options, resets or cleared gradients between ranks
    that have the same params."""
    data = model.data
    options = {**model.params.options.described(), _HOOKED: str(model.grads.sum_of_hooked)}
    told = all_gather_objects((model.grads.kept, options), data)
    two = two_that_differ([kept for kept, _ in told])
    if two is not None:
        odd, other = map(data.global_rank, two)
        raise RanksDisagreeError(
            f"After gradients were summed, rank {odd} cleared others than rank {other} did. Call "
            "optimizer.zero_grad() on all ranks, or on none."
        )
    for option in {key: None for _, of_rank in told for key in of_rank}:
        values = [of_rank.get(option, "nothing") for _, of_rank in told]
        two = two_that_differ(values)
        if two is not None:
            odd, other = two
            raise RanksDisagreeError(
                f"The {option} is {values[odd]} on rank {data.global_rank(odd)} and "
                f"{values[other]} on rank {data.global_rank(other)}. Each rank updates a part of "
                "the model, so it must be equal on all ranks. If it is computed from a value such "
                "as the loss, average that over ranks with torch.distributed.all_reduce first."
            )


def announce_drop(model: ShardedModel) -> None:
    """Collective: announces that the round ends without a step.

    It uses the same collective as a step, so a rank that makes a step at the same time does not
    hang: all ranks raise.
    """
    census = census_of(model, is_dropped=True)
    sum_with(census.new_zeros(3), _notice(model, census).numbers, model.everyone)
    if Census.unpack(census[:CENSUS_NUMEL].tolist()).round.spread(model.everyone.size):
        _raise_rounds(model, is_dropped=True)


def _raise_rounds(model: ShardedModel, *, is_dropped: bool = False) -> NoReturn:
    """Collective: raises an error that says which ranks are in which round."""
    group = model.everyone
    said = all_gather_objects((model.grads.num_rounds, is_dropped), group)
    numbers = [number for number, _ in said]
    two = two_that_differ(numbers)
    if two is None:
        ranks = ", ".join(
            str(group.global_rank(rank)) for rank, (_, dropped) in enumerate(said) if dropped
        )
        raise RanksDisagreeError(
            f"In round {numbers[0] + 1} of gradients some ranks called step(), and others made "
            f"another call (gradients were cleared on {f'rank {ranks}' if ranks else 'no rank'}). "
            "Call step(), zero_grad() and clip_grad_norm_() in the same order on all ranks."
        )
    odd, usual = two
    raise RanksDisagreeError(
        f"In this step, rank {group.global_rank(odd)} is in round {numbers[odd] + 1} of gradients, "
        f"but rank {group.global_rank(usual)} is in round {numbers[usual] + 1}. After a backward, "
        "call step() on all ranks or on none."
    )
