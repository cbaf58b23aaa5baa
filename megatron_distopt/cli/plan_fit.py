"""Which forms and places of the optimizer state fit into the memory of a machine, and what a step then costs.

For each choice of parallel sizes and dtypes, every form of main params is combined with forms of the moments. The state
stays on the device where it fits there; if it does not, the least fraction of it goes to the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from megatron_distopt.cli.plan_choice import ChoicePlan, StagePlan
from megatron_distopt.cli.plan_model import Choice
from megatron_distopt.cli.plan_times import Assumed, Machine, UpdateTimes, update_times_of
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import greatest_fraction, least_fraction
from megatron_distopt.layout.estimate import MOMENT_NBYTES

#: By dtype of the params, the forms of main params that are tried: the first two have the bits of fp32 for bf16 params.
_MAINS = {"bf16": ("float32", "remainder", "bfloat16"), "fp16": ("float32", "float16"), "fp32": ("float32",)}
#: Forms of moments that are tried: one of each number of bytes, both moments alike.
_MOMENTS = ("float32", "bfloat16", "int8")
#: Forms of main params with fewer bits than fp32, the one with more of them first.
_ROUNDED_MAINS = ("float16", "bfloat16")


@dataclass(frozen=True)
class Candidates:
    """The forms and places that are combined; an empty sequence stands for those that the plan tries by itself.

    Args:
        mains: forms of main params.
        first_moments, second_moments: their forms. Where both are empty, the moments have the same form.
        fractions: on the host.
    """

    mains: Sequence[str] = ()
    first_moments: Sequence[str] = ()
    second_moments: Sequence[str] = ()
    fractions: Sequence[float] = ()

    def forms(self, dtype: str) -> Iterator[tuple[str, str, str]]:
        """Combines main params and both moments.

        Args:
            dtype: of the params, a key of `plan_model.DTYPES`.
        """
        moments = [*itertools.product(self.first_moments or _MOMENTS, self.second_moments or _MOMENTS)]
        if not (self.first_moments or self.second_moments):
            moments = [(form, form) for form in _MOMENTS]
        for main, (first, second) in itertools.product(self.mains or _MAINS[dtype], moments):
            yield main, first, second


class Change(Enum):
    """What a combination changes about a training with fp32 state on the device; from the least to the most."""

    #: It is that.
    NOTHING = "nothing"
    #: Main params are kept in fewer bytes, with all of their bits.
    SAME_BITS = "not a bit"
    #: Some of the state is on the host; the bits are the same where both places have the same kernel.
    PLACE = "the place"
    #: Moments are rounded after every update.
    MOMENTS = "rounded moments"
    #: Main params are.
    MAINS = "rounded main"
    #: All of them are.
    ALL = "rounded state"


def _change_of(choice: Choice) -> Change:
    has_rounded_moments = (choice.exp_avg_dtype, choice.exp_avg_sq_dtype) != ("float32", "float32")
    if choice.main_params_dtype in _ROUNDED_MAINS and choice.dtype != "fp32":
        return Change.ALL if has_rounded_moments else Change.MAINS
    if has_rounded_moments:
        return Change.MOMENTS
    if choice.offload_fraction:
        return Change.PLACE
    return Change.NOTHING if choice.main_params_dtype == "float32" else Change.SAME_BITS


@dataclass(frozen=True)
class Fit:
    """One combination.

    Args:
        plan: of the choice, with these forms and with the state in this place.
        assumed: bandwidths and memory.
    """

    plan: ChoicePlan
    assumed: Assumed

    @property
    def machine(self) -> Machine:
        """The node that it is to fit into."""
        return self.assumed.machine

    @property
    def change(self) -> Change:
        """What it changes about the training."""
        return _change_of(self.plan.choice)

    @cached_property
    def left_nbytes(self) -> int:
        """What is left of the device's memory, besides the reserve; negative where that is too small."""
        return (self.machine.memory_nbytes or 0) - self.machine.reserve_nbytes - self.plan.peak_nbytes

    @cached_property
    def host_nbytes(self) -> int:
        """What a full node holds in the memory of its host."""
        return self.plan.host_nbytes(self.machine.ranks_per_node)

    @property
    def host_left_nbytes(self) -> int:
        """What is left of the host's memory; negative where it is too small, 0 where it is not limited."""
        return 0 if self.machine.host_nbytes is None else self.machine.host_nbytes - self.host_nbytes

    @property
    def without_state_nbytes(self) -> int:
        """What no form or place of the state, and no number of data-parallel ranks, makes less: params and grads."""
        held = [stage.footprint for stage in self.plan.stages]
        return max(each.param_nbytes + each.grad_nbytes + each.backward_nbytes for each in held)

    @property
    def lacking_nbytes(self) -> int:
        """What the device and the host have too little, added up; 0 where it fits."""
        return max(-self.left_nbytes, 0) + max(-self.host_left_nbytes, 0)

    @cached_property
    def slowest(self) -> StagePlan:
        """The stage whose update takes longest."""
        return max(self.plan.stages, key=lambda stage: update_times_of(stage, self.assumed).seconds)

    @property
    def update(self) -> UpdateTimes:
        """Times of that update."""
        return update_times_of(self.slowest, self.assumed)

    @property
    def moved_nbytes(self) -> int:
        """What that update reads and writes in the memory of the device."""
        return sum(share.update_nbytes for share in self.slowest.updated_at(is_on_host=False))

    @property
    def copied_nbytes(self) -> tuple[int, int]:
        """What that update copies to the host and back."""
        shares = self.slowest.updated_at(is_on_host=True)
        return sum(share.down_nbytes for share in shares), sum(share.up_nbytes for share in shares)

    @property
    def options(self) -> str:
        """The options of a run that make it so; empty where it is the default."""
        choice, usual = self.plan.choice, Choice(self.plan.choice.cut)
        names = (
            "optimizer",
            "muon_tp_mode",
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "offload_fraction",
        )
        found = {name: getattr(choice, name) for name in names if getattr(choice, name) != getattr(usual, name)}
        return " ".join(f"--distopt-{name.replace('_', '-')} {value}" for name, value in found.items())


def _order(fit: Fit) -> tuple[int, int, bool, bool]:
    """Sorts by what is changed, from the least to the most.

    Rounded main params count more than rounded moments, those more than the place, and that more than the form.
    """
    choice, positions = fit.plan.choice, list(MOMENT_NBYTES)
    main = choice.main_params_dtype if choice.dtype != "fp32" else "float32"
    return (
        1 + _ROUNDED_MAINS.index(main) if main in _ROUNDED_MAINS else 0,
        positions.index(choice.exp_avg_dtype) + positions.index(choice.exp_avg_sq_dtype),
        choice.offload_fraction > 0,
        main != "float32",
    )


def fits_of(plans: Sequence[ChoicePlan], tried: Candidates, assumed: Assumed) -> list[Fit]:
    """Combines all forms and places for every choice; what changes least about the training comes first.

    Args:
        plans: of choices, the forms and places of which do not matter.
        tried: see `Candidates`.
        assumed: has the memory of a device.

    Returns:
        Those that fit and those that do not, see `Fit.lacking_nbytes`.
    """
    bare: dict[Choice, ChoicePlan] = {}
    for plan in plans:
        kept = plan.with_state(main_params_dtype="float32", exp_avg_dtype="float32", exp_avg_sq_dtype="float32")
        kept = kept.with_state(offload_fraction=0.0)
        bare.setdefault(kept.choice, kept)
    return sorted((fit for plan in bare.values() for fit in _fits_of(plan, tried, assumed)), key=_order)


def _fits_of(plan: ChoicePlan, tried: Candidates, assumed: Assumed) -> Iterator[Fit]:
    if plan.choice.has_muon:  # whose state stays fp32 and on the device
        yield Fit(plan, assumed)
        return
    for main, first, second in tried.forms(plan.choice.dtype):
        formed = plan.with_state(main_params_dtype=main, exp_avg_dtype=first, exp_avg_sq_dtype=second)
        for fraction in tried.fractions or (_least_fraction(formed, assumed),):
            yield Fit(formed.with_state(offload_fraction=fraction), assumed)


def _least_fraction(plan: ChoicePlan, assumed: Assumed) -> float:
    """The fraction on the host that takes the fewest buckets with which the device has room; all where none has.

    Of the hundredths that take the same buckets it is the largest, which is next to what is really there.
    """
    if plan.choice.dtype == "fp32":  # whose state stays on the device
        return 0.0

    def left(fraction: float) -> int:
        return Fit(plan.with_state(offload_fraction=fraction), assumed).left_nbytes

    least = least_fraction(lambda each: left(each) >= 0)
    if not least:
        return 1.0 if least is None else 0.0
    enough = left(least)
    return greatest_fraction(lambda each: left(each) <= enough)


def check_host_memory(plan: ChoicePlan, machine: Machine) -> None:
    """Checks that the state that a choice puts on the host fits there.

    Raises:
        ConfigError: it does not; the message has the largest fraction that does.
    """
    fraction, ranks = plan.choice.offload_fraction, machine.ranks_per_node
    if not fraction or machine.host_nbytes is None or plan.host_nbytes(ranks) <= machine.host_nbytes:
        return
    limit = machine.host_nbytes
    fitting = greatest_fraction(lambda each: plan.with_state(offload_fraction=each).host_nbytes(ranks) <= limit)
    got = f"{fraction:g}, which needs {plan.host_nbytes(ranks):,} bytes on the host of a node"
    rule, remedy = f"need at most the {limit:,} bytes of --host-memory", f"Write --offload-fraction {fitting:g}"
    raise ConfigError(refusal("--offload-fraction", got, rule, remedy))
