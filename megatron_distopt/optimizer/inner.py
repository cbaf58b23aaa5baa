"""The inner optimizer, as the sharded step sees it: what was chosen, and one step of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Number, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.config import ADAM_NAMES
from megatron_distopt.device import CPU
from megatron_distopt.layout import OwnerPlan, Span
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    LowPrecisionTensor,
    part_of,
    stored_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import RemainderValues
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup

#: What a class keeps for every element. Of a class that a user names it is known after its first
#: step only.
_MOMENTS = {
    **dict.fromkeys(ADAM_NAMES, frozenset(("exp_avg", "exp_avg_sq"))),
    "torch_sgd": frozenset(("momentum_buffer",)),
}

#: Options of torch's param groups that choose a kernel and not a result.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]
_MISSING = object()
#: So many param groups are given to one constructor of torch's.
_GROUPS_AT_ONCE = 64


#: Types of options that cannot change in place.
FIXED = (type(None), Number, str)
#: Options of torch's classes that are one number, and those that are on or off.
NUMBERS = ("lr", "initial_lr", "eps", "weight_decay", "momentum", "dampening")
SWITCHES = ("amsgrad", "maximize", "nesterov")
#: What a param group holds beside options.
_PARAMS = ("params", "param_names")


def option_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its params."""
    return {key: value for key, value in group.items() if key not in _PARAMS}


def python_number(value: Any) -> Any:
    """A number of any kind as one of Python's; other values as they are."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def for_kernels(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as torch's fused kernels take them: the others take fractions, and numbers for
    switches, too."""
    taken = dict(options)
    taken.update({key: python_number(options[key]) for key in NUMBERS if key in options})
    taken.update({key: bool(options[key]) for key in SWITCHES if key in options})
    if isinstance(taken.get("betas"), tuple):
        taken["betas"] = tuple(map(python_number, taken["betas"]))
    return taken


def option_text(value: Any, *, waits: bool = True) -> str:
    """Says what an option is, alike on all ranks that have the same one; of an object only of which
    kind, as its text may have an address.

    Where it must not wait, a tensor of a device is told by the writes to it.
    """
    text = partial(option_text, waits=waits)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {text(member)}' for key, member in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(map(text, value))}"
    if torch.is_tensor(value):
        is_read = waits or value.device.type == CPU
        return f"tensor {value.tolist() if is_read else (id(value), value._version)}"
    if isinstance(value, FIXED):
        return repr(value)
    return f"array {value.tolist()}" if hasattr(value, "tolist") else type(value).__name__


def changed_options(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a param group that are other objects than before, as they were written since
    then."""
    changed = {key: value for key, value in group.items() if value is not before.get(key, _MISSING)}
    return (
        {key: value for key, value in changed.items() if key not in (*_PARAMS, *IMPLEMENTATION)}
        if changed
        else {}
    )


class FlatOptimizer(Optimizer):
    """An inner optimizer of ours. Its traits are those of torch's own classes where a class does
    not say otherwise."""

    rounds_itself = False  # whether the update of a main param writes the rounded model param, too
    # whether `grad_scale` and `found_inf` are read as by torch's fused optimizers
    reads_tensors = False
    _models: Mapping[Tensor, Tensor] = {}
    _places: Mapping[Tensor, int] = {}
    #: Averages that the next update may move, by main param; it takes out those that it has moved.
    #: Then their weight.
    due: tuple[dict[Tensor, Tensor], float] = ({}, 0.0)

    def round_into(
        self, models: Mapping[Tensor, Tensor], places: Mapping[Tensor, int] = {}
    ) -> None:
        """From now on the update of a main param is rounded into its model param, where this
        `rounds_itself`.

        `places`: of the first elements of main params among those of their buffers; random rounding
        depends on it.
        """
        self._models, self._places = dict(models), dict(places)

    def update_with(
        self,
        mains: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        divisor: float | Tensor,
        found_inf: Tensor | None,
    ) -> bool:
        """`update_mains` without `.grad`; False where nothing was done, so that `step` has to."""
        return False

    def new_moment(self, main: Tensor, kind: str) -> Tensor | None:
        """Zeros in the form of its own in which a moment of a main param is kept, to be filled and
        given to `restore`.

        The present one stays, because it may be what is loaded. None where moments have the form in
        which they come.
        """
        return None

    def take_moments(self, main: Tensor) -> None:
        """Brings moments that others have put into the state of a main param into the form in which
        they are kept."""


class InParts(FlatOptimizer):
    """An inner optimizer that updates whole matrices or params, and knows what its main params are
    pieces of.

    It may have several parts, each of which updates some of the param groups. They share its state
    and its param groups, and count updates where torch's classes do.
    """

    owners: list[OwnerPlan]  # who updates what, by buffer; the same on all ranks
    # params, the same on all ranks, that the next step does not update
    left_out: frozenset[str] = frozenset()

    def part_for(self, group: Mapping[str, Any]) -> Optimizer:
        """The part that updates a param group."""
        return self

    def hold(
        self,
        buffers: Sequence[ShardedBuffer],
        flat_params: Sequence[FlatParam],
        groups: Sequence[ParamGroup],
    ) -> None:
        """Says what the main params are pieces of, whenever they are other ones."""
        raise NotImplementedError

    def nbytes_elsewhere(self) -> int:
        """Bytes of what this rank keeps elsewhere than in `state`."""
        return 0


def part_for(inner: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """What updates a param group: the inner optimizer or a part of it."""
    return inner.part_for(group) if isinstance(inner, InParts) else inner


@dataclass(frozen=True)
class InnerChoice:
    """The inner optimizer that was chosen."""

    name: str  # of the source, e.g. "torch_fused".
    build: Build  # from param groups of main params
    # how it came to that; one line for each better source that was passed over
    why: tuple[str, ...] = ()
    # of an optimizer that brings its own, for comparison between ranks
    defaults: tuple[str, ...] = ()
    # builds the same for params on the host, with the same form of state; None where there is no
    # such
    on_host: Build | None = None
    updates_whole_params: bool = False  # whether each param is updated whole, by one rank
    # keys that a user's class writes into its param groups by itself, beside options of its
    # constructor
    writes: frozenset[str] = frozenset()

    @property
    def is_adam(self) -> bool:
        """Whether it is one of our sources of Adam, which keep two moments and count their
        updates."""
        return self.name in ADAM_NAMES

    @property
    def moments(self) -> frozenset[str]:
        """What it keeps for every element, as far as that is known before its first step."""
        return _MOMENTS.get(self.name, frozenset())


def build_in_parts(build: Build, groups: Groups) -> Optimizer:
    """Builds an optimizer that keeps its params in state and param groups alone.

    torch looks for every param of a group in all groups before it, so the time for one object grows
    with the square of their number.
    """
    starts = range(0, len(groups), _GROUPS_AT_ONCE)
    built, *others = (build(groups[start : start + _GROUPS_AT_ONCE]) for start in starts)
    for other in others:
        built.state.update(other.state)
        built.param_groups += other.param_groups
    return built


def step_divided(
    inner: Optimizer,
    grads: Sequence[Tensor],
    divisor: float | Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """One step of the inner optimizer with every gradient divided by `divisor` (loss scale, average
    and clip in one).

    torch's fused kernels divide while they read the gradient anyway; for the others it is a pass of
    its own. Where torch's kernels divide they write the quotient back, so `grads` hold it
    afterwards either way.

    `divisor` and `found_inf` are fp32 0-D on the device of the grads, which are the `.grad` of all
    params. Where `found_inf` is 1 nothing is changed, not even the count of updates; only for what
    `skips_by_itself`.
    """
    if _has_some_momentum(inner):  # once without the fused kernel, and so without its division
        for group in inner.param_groups:
            group["fused"] = False
        try:
            step_divided(inner, grads, divisor)
        finally:
            for group in inner.param_groups:
                group["fused"] = True
        return
    given: dict[str, Tensor] = {} if found_inf is None else {"found_inf": found_inf}
    if grads and not (isinstance(divisor, float) and divisor == 1.0):
        if _divides_itself(inner):
            if not isinstance(divisor, Tensor):
                divisor = torch.full((), divisor, dtype=torch.float32, device=grads[0].device)
            given["grad_scale"] = divisor
        else:
            torch._foreach_div_(list(grads), divisor)
    for name, tensor in given.items():  # torch's fused kernels find them in attributes
        setattr(inner, name, tensor)
    try:
        inner.step()
    finally:
        for name in given:
            delattr(inner, name)


def update_mains(
    inner: Optimizer,
    mains: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    divisor: float | Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """`step_divided` with the gradients as values; torch's classes find them in `.grad`, for as
    long as this takes.

    A gradient is None for a main param that is not updated; other params of `inner` have none.
    """
    if isinstance(inner, FlatOptimizer) and inner.update_with(mains, grads, divisor, found_inf):
        return
    for main, grad in zip(mains, grads, strict=True):
        main.grad = grad
    try:
        step_divided(inner, [grad for grad in grads if grad is not None], divisor, found_inf)
    finally:
        for main in mains:
            main.grad = None


_WHEN = ("pre", "post")


@contextmanager
def without_step_hooks(*optimizers: Optimizer) -> Iterator[None]:
    """Within it, hooks of the user on all optimizers, and those on these ones, are not called.

    torch calls them in the `step` of every optimizer, also where a class or a part is stepped by
    another.
    """
    of_torch: Any = sys.modules["torch.optim.optimizer"]
    places = [(of_torch, f"_global_optimizer_{when}_hooks") for when in _WHEN]
    places += [(each, f"_optimizer_step_{when}_hooks") for each in optimizers for when in _WHEN]
    hooks = [getattr(*place) for place in places]
    if not any(hooks):  # as in nearly every step
        yield
        return
    try:
        for place in places:
            setattr(*place, {})
        yield
    finally:
        for place, found in zip(places, hooks, strict=True):
            setattr(*place, found)


def rounds_itself(inner: Optimizer) -> bool:
    """Whether its update writes the model params, too."""
    return isinstance(inner, FlatOptimizer) and inner.rounds_itself


def _has_some_momentum(inner: Optimizer) -> bool:
    """Whether torch's fused SGD would fail: it takes params that all have momentum, or none of
    them."""
    if not isinstance(inner, torch.optim.SGD) or not _divides_itself(inner):
        return False
    kinds = [
        {bool(inner.state.get(param)) for param in group["params"] if param.grad is not None}
        for group in inner.param_groups
        if group["momentum"]
    ]
    return any(len(kind) > 1 for kind in kinds)


def _divides_itself(inner: Optimizer) -> bool:
    """Whether `inner.grad_scale` is read. Others set torch's flag for it too and mean a keyword of
    `step`."""
    reads = (
        inner.reads_tensors
        if isinstance(inner, FlatOptimizer)
        else type(inner).__module__.startswith("torch.optim.")
    )
    return reads and all(group.get("fused") for group in inner.param_groups)


def skips_by_itself(inner: Optimizer) -> bool:
    """Whether `inner.found_inf` makes a step change nothing.

    torch's fused SGD reads it too, but then keeps momentum buffers that were never written if it is
    the first step.
    """
    return _divides_itself(inner) and isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def is_torchs(inner: Optimizer) -> bool:
    """Whether torch itself provides the class, or what it inherits from; or one that keeps state as
    torch's do."""
    classes = [each for each in type(inner).__mro__ if each is not Optimizer]
    return isinstance(inner, InParts) or any(
        each.__module__.startswith("torch.optim.") for each in classes
    )


def state_of(inner: Optimizer, main: Tensor) -> dict[str, Any]:
    """What the inner optimizer keeps of a main param; empty before the first step, and where owners
    keep it."""
    # a state that refuses others is read past its methods
    found: dict[str, Any] = dict.get(inner.state, main, {})
    return found


def moments_of(inner: Optimizer, main: Tensor) -> dict[str, Tensor]:
    """What it keeps for every element, by key."""
    state = state_of(inner, main)
    return {
        key: value
        for key, value in state.items()
        if torch.is_tensor(value) and value.shape == main.shape
    }


def moment_to_fill(inner: Optimizer, main: Tensor, kind: str, dtype: torch.dtype) -> Tensor | None:
    """Memory for a moment that is about to be loaded from one of a dtype; all of it has to be
    filled.

    Returns:
        Zeros in the form of the inner optimizer where it decides, or else the present moment where
        it has the dtype; None where neither is there.
    """
    made = inner.new_moment(main, kind) if isinstance(inner, FlatOptimizer) else None
    if made is not None:
        return made
    known = moments_of(inner, main).get(kind)
    return known if known is not None and known.dtype == dtype else None


def count_updates(inner: Optimizer) -> int | None:
    """How often it has updated; None for one that does not count, or has not begun.

    torch counts in the state of each param, apex and others in the param groups.
    """
    states = (state_of(inner, main) for group in inner.param_groups for main in group["params"])
    return max(
        (int(holder["step"]) for holder in (*inner.param_groups, *states) if "step" in holder),
        default=None,
    )


def restore(
    inner: Optimizer,
    group: dict[str, Any],
    main: Tensor,
    moments: Mapping[str, Tensor],
    step: int | None,
) -> None:
    """Gives a main param, which is in `group`, its state back, in the form that the class of
    `inner` wants it.

    Moments are as large as `main` and not copied. `step` counts updates; None for a class that does
    not.
    """
    state: dict[str, Any] = dict(moments)
    if step is not None and is_torchs(inner):
        state["step"] = _count(group, main, step)
    if step is not None and type(inner).__module__.startswith("deepspeed."):
        state["step"] = step
    inner.state.pop(main, None)
    if state:
        inner.state[main] = state
    if isinstance(inner, FlatOptimizer):
        inner.take_moments(main)


def _count(group: Mapping[str, Any], main: Tensor, step: int) -> Tensor:
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(float(step), device=main.device if on_device else None)


def begin_counts(inner: Optimizer) -> None:
    """Adds a count of zero to moments of Adam that others have made without one, as a host's
    functions do."""
    if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        return
    for group in inner.param_groups:
        for main in group["params"]:
            state = inner.state.get(main)
            if state and "step" not in state:
                state["step"] = _count(group, main, 0)


def split_state(
    inner: Optimizer, group: dict[str, Any], main: Tensor, parts: Mapping[Span, Tensor]
) -> None:
    """Replaces a main param in `group` by parts, in order, that are views of some of its elements,
    state included."""
    index = next(number for number, each in enumerate(group["params"]) if each is main)
    group["params"][index : index + 1] = list(parts.values())
    state = inner.state.pop(main, {})
    # A moment is cut; a count of updates is each part's own from now on.
    tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
    for part, tensor in parts.items() if state else ():
        cut = {
            key: part_of(v, part) if v.shape == main.shape else v.clone()
            for key, v in tensors.items()
        }
        inner.state[tensor] = {**state, **cut}
        stored = stored_of(tensor)
        if isinstance(stored, RemainderValues) and "exp_avg_sq" in state:
            inner.state[tensor]["exp_avg_sq"] = LowPrecisionTensor(stored.second)


def counts_in_groups(choice: InnerChoice, inner: Optimizer) -> bool:
    """Whether updates are counted once for a param group, as apex does, and not for each param, as
    torch does."""
    return "step" in choice.writes or (choice.is_adam and not is_torchs(inner))


def restore_group(inner: Optimizer, group: dict[str, Any], step: int | None) -> None:
    """The part of `restore` that concerns a whole param group, also one without a param on this
    rank."""
    if step is not None and not is_torchs(inner):
        group["step"] = step
