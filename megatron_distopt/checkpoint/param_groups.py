"""Param groups as a checkpoint holds them: what may be in them, and how they are read off a live
optimizer."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from numbers import Number
from typing import Any, TypeAlias

import torch

from megatron_distopt.buffers import dtype_name
from megatron_distopt.errors import CheckpointError, ConfigError
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.inner_options import IMPLEMENTATION, NUMBERS, python_number
from megatron_distopt.optimizer.inner_state import state_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer

#: Of a param group, by name.
Options: TypeAlias = Mapping[str, Any]
#: The key of a dynamic loss scale in the first param group, which is where torch's format can hold
#: one.
LOSS_SCALE = "dynamic_loss_scale"
#: torch treats numpy's numbers of at least so many bytes like Python's; it rounds to shorter ones.
_LEAST_ITEMSIZE = 4
#: Keys of a param group that are not saved as options: the run that loads chooses its kernel and
#: whether experts are spread over ranks, and the count and the loss scale have fields of their own.
NOT_OPTIONS = ("params", "step", *IMPLEMENTATION, "is_expert_parallel", LOSS_SCALE)
#: From these the scheduler of a Megatron computes lr and weight_decay of every step. Nothing
#: changes them in a run.
SCHEDULE = frozenset(("max_lr", "min_lr", "start_wd", "end_wd", "lr_mult", "wd_mult"))
_SCHEDULED = ("lr", "weight_decay")
#: Options beside `NUMBERS` with which every optimizer computes.
_LISTS_OF_NUMBERS = ("betas",)
_log = logging.getLogger("megatron_distopt")


@dataclass(frozen=True)
class Scalar:
    """A number that the inner optimizer keeps once for a param; dtype "" for a Python number."""

    value: float
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Scalar:
        """Makes one from a tensor of one element, or from a Python value."""
        if torch.is_tensor(value):
            return cls(value.item(), dtype_name(value.dtype))
        return cls(value, "")


@dataclass(frozen=True)
class GroupRecord:
    """Params of one param group that have been updated equally often."""

    names: tuple[str, ...]  # of its params
    options: Options  # of `torch.optim`: numbers, texts, and lists of them
    # updates so far; None where they are not counted, or no param ever had a gradient
    step: int | None = None
    # what else is kept once a param; equal for all of them
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    # options that a file cannot keep, with their types
    unsaved: Mapping[str, str] = field(default_factory=dict)
    # original values of options that the run has changed, for example by a scheduler
    given: Options = field(default_factory=dict)

    @property
    def meaning(self) -> str:
        """Everything except the names; groups of equal meaning are joined."""
        meant = [self.options, self.step, self.scalars, self.unsaved, self.given]
        return json.dumps(meant, sort_keys=True, default=astuple)


def join_groups(groups: Iterable[GroupRecord]) -> tuple[GroupRecord, ...]:
    """Joins groups of equal meaning; ranks may number the same groups differently."""
    first: dict[str, GroupRecord] = {}
    names: dict[str, list[str]] = {}
    for group in groups:
        first.setdefault(group.meaning, group)
        names.setdefault(group.meaning, []).extend(group.names)
    return tuple(
        replace(group, names=tuple(dict.fromkeys(names[meaning])))
        for meaning, group in first.items()
    )


def check_groups(groups: Sequence[GroupRecord], where: str) -> None:
    """Checks groups that were read: an optimizer can compute with the values, and every param is in
    one group."""
    check_values(groups, where)
    check_names_once(groups, where)


def check_values(groups: Sequence[GroupRecord], where: str) -> None:
    for number, group in enumerate(groups):
        for key, value, rule in _faults(group):
            raise CheckpointError(
                f"{key} of param group {number} in {where} is {value!r}, and must {rule}. Set "
                f"{key} in the run that saves it, or load another checkpoint."
            )


def check_options(number: int, options: Mapping[Any, Any], choice: InnerChoice) -> None:
    """Refuses options of the param group of that number with which the inner optimizer cannot
    compute as torch does, and those that a save would refuse.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    for key in options:
        if not isinstance(key, str):
            raise ConfigError(
                f"Param group {number} has the key {key!r}, but only texts can be keys in a file. "
                f"Write {str(key)!r}."
            )
    faults = _faults(GroupRecord((), plain_options(options)))
    rules = {key: rule for key, _, rule in faults}
    for key in NUMBERS:
        if choice.moments and options.get(key, 0) is None:
            rules[key] = "be a finite number"
        if not _is_scalar(options.get(key)):
            rules[key] = "be a number of at least 32 bits, and no array"
    for key, rule in rules.items():
        raise ConfigError(
            f"{key} of param group {number} is {options[key]!r:.80}, and must {rule}. Write "
            "another value, or convert it by float(...)."
        )


def _is_scalar(value: Any) -> bool:
    """Whether torch computes with an option as with a number of Python, unlike with numpy's
    arrays and its numbers of 16 bits."""
    if torch.is_tensor(value) or not hasattr(value, "tolist"):
        return True
    return isinstance(value, Number) and getattr(value, "itemsize", 0) >= _LEAST_ITEMSIZE


def _faults(group: GroupRecord) -> Iterator[tuple[str, object, str]]:
    """Key, value and rule of everything that is wrong."""
    for key, value in group.options.items():
        rule = _broken_rule(key, value)
        if rule is not None:
            yield key, value, rule
    step = group.step
    if step is not None and (type(step) is not int or step < 0):
        yield "step", step, "be a whole number of at least 0"
    for key, scalar in group.scalars.items():
        if not isinstance(scalar.value, (bool, int, float)):
            yield key, scalar.value, "be a number"


def _broken_rule(key: str, value: object) -> str | None:
    if key in _LISTS_OF_NUMBERS:
        is_right = isinstance(value, list) and bool(value) and all(map(_is_number, value))
        return None if is_right else "be a list of finite numbers"
    if key not in NUMBERS:
        return "not be nan" if _has_nan(value) else None
    numbers = [value]
    # Adafactor has two eps, and None for one that depends on the dtype.
    if key == "eps" and isinstance(value, list) and len(value) == 2:
        numbers = value
    is_right = all(each is None or _is_number(each) for each in numbers)
    return None if is_right else "be a finite number"


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _has_nan(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def check_names_once(groups: Sequence[GroupRecord], where: str) -> None:
    number_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name in group.names:
            first = number_of.setdefault(name, number)
            if first != number:
                difference = _difference(groups[first], group)
                raise CheckpointError(
                    f"Param {name!r} in {where} is in param groups {first} and {number}, which "
                    f"differ in {difference}. An optimizer takes each param once. Load an earlier "
                    "checkpoint."
                )


def _difference(one: GroupRecord, other: GroupRecord) -> str:
    """The first key in which two groups differ, with both values."""
    left = {"step": one.step, **one.options, **one.scalars}
    right = {"step": other.step, **other.options, **other.scalars}
    for key in {**left, **right}:
        ours, theirs = left.get(key), right.get(key)
        if ours != theirs:
            return f"{key}: {ours} and {theirs}"
    return "nothing"


def check_types(saved: Options, current: Options, place: str, remedy: str) -> None:
    """Checks that every saved option has the type of the option that a param group has."""
    ours = plain_options(current)
    for key, value in saved.items():
        is_missing = key in NUMBERS and value is None and ours.get(key) is not None
        is_compared = key in ours and key not in NOT_OPTIONS
        is_unlike = is_compared and not _is_like(value, ours[key])
        if is_missing or is_unlike:
            raise CheckpointError(
                f"{key} {place} is {value!r}, and must have the type of {current[key]!r}, which "
                f"the run has. {remedy}."
            )


def _is_like(saved: object, current: object) -> bool:
    """Whether a saved option can take the place of the plain one that a param group has.

    >>> _is_like("1e-3", 1e-3), _is_like(True, 0.9)
    (False, False)
    >>> _is_like([0.9, 0.95], [0.9, 0.999]), _is_like(2, 0.5)
    (True, True)
    """
    if current is None or saved is None:
        return True
    if isinstance(current, bool):
        return isinstance(saved, bool) or saved in (0, 1)
    if isinstance(current, (int, float)):
        return isinstance(saved, (int, float)) and not isinstance(saved, bool)
    if isinstance(current, list):
        return (
            isinstance(saved, list)
            and len(saved) == len(current)
            and all(map(_is_like, saved, current))
        )
    return isinstance(saved, type(current))


def step_of(
    optimizer: ShardedOptimizer, group: Options, flat: FlatParam, scalars: Mapping[str, Scalar]
) -> int | None:
    """Updates of a flat param, wherever the class counts them; an Adam without moments has not
    updated it yet."""
    has_state = bool(state_of(optimizer.inner, flat.main))
    is_begun = has_state or not optimizer.plan.choice.is_adam
    if "step" in group and is_begun:
        return int(group["step"])
    return int(scalars["step"].value) if "step" in scalars else None


def not_options(optimizer: ShardedOptimizer) -> tuple[str, ...]:
    """`NOT_OPTIONS` of a run. A class that is not our Adam may count updates in its param group;
    that count is saved like an option."""
    if optimizer.plan.choice.is_adam:
        return NOT_OPTIONS
    return tuple(key for key in NOT_OPTIONS if key != "step")


def options_of(
    group: Options, others: Collection[str] = NOT_OPTIONS
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that a file can keep, and the names of the types of the others."""
    chosen = {key: value for key, value in group.items() if key not in others}
    options = plain_options(chosen)
    unsaved = {}
    left_out = [key for key, value in options.items() if not _is_plain(value)]
    for key in left_out:
        unsaved[key] = type(group[key]).__name__
        _log.warning("param group option %r is a %s and will not be saved", key, unsaved[key])
        del options[key]
    return options, unsaved


def given_otherwise(given: Options, options: Options) -> dict[str, Any]:
    """The given values of those options that have another value now, as plain options."""
    otherwise = {}
    for key in filter(given.__contains__, options):
        value = plain_option(given[key])
        if value != options[key]:
            otherwise[key] = value
    return otherwise


def given_alike(saved: GroupRecord, given: Options) -> frozenset[str]:
    """The options that the saved run has changed by itself, and that both runs were given alike.

    >>> scheduled = GroupRecord((), {"lr": 8e-4}, given={"lr": 1e-3})
    >>> sorted(given_alike(scheduled, {"lr": 1e-3})), sorted(given_alike(scheduled, {"lr": 2e-3}))
    (['initial_lr', 'lr'], [])
    """
    alike = saved.given.keys() - given_otherwise(given, saved.given)
    if "lr" in alike:
        alike.add("initial_lr")  # of torch's schedulers
    return frozenset(alike)


def plain_options(options: Options) -> dict[str, Any]:
    """Options as a file keeps them, without the params of a live group."""
    plain = {key: plain_option(value) for key, value in options.items() if key != "params"}
    for key in plain.keys() & {*NUMBERS, *_LISTS_OF_NUMBERS}:
        if isinstance(plain[key], list):
            numbers = map(python_number, plain[key])
            plain[key] = list(numbers)
        else:
            plain[key] = python_number(plain[key])
    return plain


def plain_option(value: Any) -> Any:
    """An option as a file keeps it: a tensor of one element, such as a learning rate, becomes a
    number, a larger one, an array or a tuple a list."""
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    if hasattr(value, "tolist"):  # of torch and numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_option(member) for key, member in value.items()}
    if isinstance(value, str):
        return str.__str__(value)  # str() of a member of an enum of texts would be its name
    if isinstance(value, (list, tuple)):
        return list(map(plain_option, value))
    return value


def differences(
    current: Options, saved: Options, kept: Collection[str] = (), writes: Collection[str] = ()
) -> Iterator[str]:
    """Says for a resume which options of a param group differ, and whose value holds from now on.

    Leaves out what the class `writes` by itself and, in a Megatron's group, what its scheduler
    sets.

    >>> list(differences({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": [0.9, 0.95]}))
    ['betas is [0.9, 0.95], as in the checkpoint; this run was given [0.9, 0.99]']
    """
    silent = {*NOT_OPTIONS, *writes}
    if "wd_mult" in current:
        silent.update(_SCHEDULED)
    all_ours = plain_options(current)
    all_theirs = plain_options(saved)
    for key in sorted(all_ours.keys() & all_theirs.keys() - silent):
        ours, theirs = all_ours[key], all_theirs[key]
        if ours != theirs and key in kept:
            yield f"{key} is {ours}, as in this run; the checkpoint has {theirs}"
        elif ours != theirs:
            yield f"{key} is {theirs}, as in the checkpoint; this run was given {ours}"


def tell(lines: Iterable[str]) -> None:
    """Logs what a resume has changed, each line once."""
    for line in dict.fromkeys(lines):
        _log.info("resumed: %s", line)


def take_options(
    pairs: Sequence[tuple[MutableMapping[str, Any], Options]],
    rank: int,
    kept: Collection[str] = (),
    writes: Collection[str] = (),
) -> None:
    """Writes saved options into the param group beside them, but for `kept` ones; the first rank
    says what changes."""
    if rank == 0:
        tell(line for current, saved in pairs for line in differences(current, saved, kept, writes))
    for current, saved in pairs:
        for key, value in saved.items():
            if key not in kept:
                current[key] = as_kept(value, current.get(key))


def as_kept(saved: Any, current: Any) -> Any:
    """A saved option in the form that the group has now; a tensor or an array is filled in place,
    because others may hold it."""
    if saved is None:
        return None
    if torch.is_tensor(current):
        values = torch.tensor(saved, dtype=current.dtype)
        return current.copy_(values.view(current.shape))
    if hasattr(current, "tolist") and hasattr(current, "__setitem__"):  # an array of numpy
        current[...] = saved
        return current
    if isinstance(current, (list, tuple)) and len(saved) == len(current):
        members = list(map(as_kept, saved, current))
        if isinstance(current, tuple):
            is_named = hasattr(current, "_fields")
            return type(current)(*members) if is_named else tuple(members)
        return members
    return saved


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        has_names = all(isinstance(key, str) for key in value)
        return has_names and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
