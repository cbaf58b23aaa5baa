"""Loading a state in torch's format: of torch's own optimizer, of torch.distributed.checkpoint, or of this package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.dcp import ShardedValue
from megatron_distopt.checkpoint.load import as_kept, fill_groups, separate
from megatron_distopt.checkpoint.load_groups import GroupMatch, check_steps, needed_moments
from megatron_distopt.checkpoint.load_plan import Read, find_targets
from megatron_distopt.checkpoint.manifest import Chunk, key_of
from megatron_distopt.checkpoint.param_groups import (
    NOT_OPTIONS,
    GroupRecord,
    Scalar,
    check_groups,
    check_not_across_muon,
    check_types,
    plain_option,
)
from megatron_distopt.checkpoint.saved_by_name import SavedState
from megatron_distopt.checkpoint.torch_state import MAIN_PARAM, STEP, TorchParams, is_adam
from megatron_distopt.checkpoint.whole_model import flat_params_of
from megatron_distopt.comm import exchange_together
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.inner import is_torchs, moments_of

#: What all ranks must be given alike for a param, in the order of `_told`.
_WHATS = ("step", "kinds", "options")
_REMEDY = "Load what optimizer.state_dict() of the same params in the same groups returned"


@dataclass(frozen=True, eq=False)
class _GivenState:
    """The state that is given for one param.

    Args:
        values: tensors with a value for each element, by kind; "main_param" is one of the kinds.
        scalars: what is kept once for the param, by key; the count of updates is one of them.
    """

    values: Mapping[str, Tensor]
    scalars: Mapping[str, Any]

    @property
    def step(self) -> int | None:
        """Updates so far."""
        return int(self.scalars[STEP]) if STEP in self.scalars else None

    @property
    def saved(self) -> SavedState:
        """As the load of a checkpoint has it."""
        kinds = sorted((kind, torch.float32) for kind in self.values if kind != MAIN_PARAM)
        scalars = {key: Scalar.of(value) for key, value in self.scalars.items()} if kinds else {}
        return SavedState(self.step if kinds else None, tuple(sorted(scalars.items())), tuple(kinds))


@torch.no_grad()
def load_torch_state_dict(params: TorchParams, state_dict: Mapping[str, Any]) -> None:
    """Collective: loads a state in torch's format, after all ranks have checked theirs.

    Values are whole tensors, of which each rank takes what it owns, or sharded ones of this layout. Options of the
    param groups go into `params.groups`. Model params are left alone, as torch leaves them: a main param that does not
    round to its model param has to follow it before the next step.

    Args:
        params: of the optimizer; the load may cut flat params.
        state_dict: in torch's format; its params are numbers or names, in the order of the groups.

    Raises:
        CheckpointError: on a rank that cannot take its state; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    checked: list[dict[str, _GivenState]] = []

    def check() -> dict[str, tuple[object, ...]]:
        checked.append(_checked(params, state_dict))
        return _told(params, state_dict, checked[0])

    _check_agreement(exchange_together(check, params.everyone, "load"))
    _take_options(params, state_dict["param_groups"])
    _take_states(params, checked[0])


def names_with_state(params: TorchParams, state_dict: Mapping[str, Any]) -> list[str]:
    """Names of params that have a state in a state dict; none where a load would refuse the form of the dict."""
    try:
        _check_form(params, state_dict)
    except CheckpointError:
        return []
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return [name for name, number in zip(params.numbered, numbers, strict=True) if state_dict["state"].get(number)]


def _checked(params: TorchParams, state_dict: Mapping[str, Any]) -> dict[str, _GivenState]:
    """Checks the state dict, and returns what it has for each param of the sharded step, by name."""
    _check_form(params, state_dict)
    _check_options(params, state_dict["param_groups"])
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    entries = dict(zip(params.numbered, (state_dict["state"].get(number, {}) for number in numbers), strict=True))
    scalars = _scalar_keys(entries, params)
    trained = {name for group in params.share.optimizer.plan.groups for name in group.names}
    given = {name: _given(params, name, entry, scalars) for name, entry in entries.items() if name in trained}
    for group, names in zip(state_dict["param_groups"], params.names, strict=True):
        for name in names:
            if name in given:
                _check_kinds(params, name, given[name], has_maxima=bool(group.get("amsgrad")))
    for _ in _reads(params, given):
        pass  # finds missing elements before anything is changed
    _check_counts(params, given)
    return given


def _check_form(params: TorchParams, state_dict: Mapping[str, Any]) -> None:
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        got = f"one with {', '.join(map(str, list(state_dict)[:5])) or 'nothing'}"
        raise CheckpointError(refusal("state dict", got, f"hold {' and '.join(missing)}", _REMEDY))
    groups, ours = state_dict["param_groups"], [len(names) for names in params.names]
    numels = [len(group.get("params", ())) for group in groups]
    if numels != ours:
        got, rule = f"{numels} params by group", f"hold {ours} params by group, as the optimizer"
        raise CheckpointError(refusal("param groups of the state dict", got, rule, _REMEDY))


def _check_options(params: TorchParams, groups: Sequence[Mapping[str, Any]]) -> None:
    records = [GroupRecord((), {key: plain_option(each) for key, each in _options(group).items()}) for group in groups]
    check_groups(records, "the state dict")
    for number, (record, current) in enumerate(zip(records, params.groups, strict=True)):
        place = f"of param group {number} in the state dict"
        check_types(record.options, current, place, _REMEDY)
        check_not_across_muon(record.options, current, place)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS and key != "param_names"}


def _scalar_keys(entries: Mapping[str, Mapping[str, Any]], params: TorchParams) -> set[str]:
    """Keys of which a param has one number, as seen from the params of more than one element."""
    found = {STEP}
    for name, entry in entries.items():
        if name in params.share.placements and math.prod(params.share.placements[name].global_shape) > 1:
            found |= {key for key, value in entry.items() if not torch.is_tensor(value) or value.numel() == 1}
    needed = (needed_moments(params.share.optimizer, number) for number in range(len(params.names)))
    return found - frozenset().union(*needed) - {MAIN_PARAM}


def _given(params: TorchParams, name: str, entry: Mapping[str, Any], scalars: set[str]) -> _GivenState:
    shape = params.share.placements[name].global_shape
    values = {key: value for key, value in entry.items() if key not in scalars and value is not None}
    for key, value in values.items():
        if not torch.is_tensor(value) or tuple(value.shape) != shape:
            got = f"shape {list(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
            rule = f"be a tensor of its shape {list(shape)}"
            raise CheckpointError(refusal(f"{key} of {name!r} in the state dict", got, rule, _REMEDY))
    numbers = {
        key: value
        for key, value in entry.items()
        if key in scalars and not isinstance(value, (ShardedValue, type(None)))
    }
    for key, value in numbers.items():
        is_right = (
            _is_number(value) and float(value) >= 0 if key == STEP else _is_number(value) or isinstance(value, str)
        )
        if not is_right:
            got, rule = repr(value), "be a number of at least 0" if key == STEP else "be a number or a text"
            raise CheckpointError(refusal(f"{key} of {name!r} in the state dict", got, rule, _REMEDY))
    return _GivenState(values, numbers)


def _is_number(value: object) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1 and bool(torch.isfinite(value).all())
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _check_kinds(params: TorchParams, name: str, given: _GivenState, *, has_maxima: bool) -> None:
    """Checks that the state holds what the inner optimizer needs, or nothing."""
    optimizer, kinds = params.share.optimizer, given.values.keys() - {MAIN_PARAM}
    known = (frozenset(moments_of(optimizer.inner, flat.main)) for flat in optimizer.flat_params)
    number = params.number_of(name)
    wanted = needed_moments(optimizer, number) or next((each for each in known if each), frozenset())
    wanted |= {"max_exp_avg_sq"} if is_adam(optimizer, number) and has_maxima else set()
    has_begun = bool(kinds) or bool(given.step)
    if has_begun and not wanted <= kinds:
        got = f"{', '.join(sorted(kinds)) or 'nothing'} besides the param"
        rule, remedy = (
            f"hold {', '.join(sorted(wanted))} for {optimizer.plan.choice.name}",
            "Load a state of the same class",
        )
        raise CheckpointError(refusal(f"state of {name!r} in the state dict", got, rule, remedy))


def _without_begin(params: TorchParams, name: str, given: _GivenState) -> _GivenState:
    """Drops a state of zeros with a count of 0: the param was never updated, and has no state in the optimizer."""
    is_begin = given.step == 0 and is_adam(params.share.optimizer, params.number_of(name))
    if not is_begin or any(_holds_more_than_zeros(value) for key, value in given.values.items() if key != MAIN_PARAM):
        return given
    return _GivenState({key: value for key, value in given.values.items() if key == MAIN_PARAM}, {})


def _holds_more_than_zeros(value: Tensor) -> bool:
    parts = value.parts if isinstance(value, ShardedValue) else [value]
    return any(bool(part.count_nonzero()) for part in parts)


def _reads(params: TorchParams, given: Mapping[str, _GivenState]) -> Iterator[tuple[Read, Tensor]]:
    """Everything that this rank owns of what is given, with the places that it goes to.

    An fp32 model param is its own main param; it is left alone, as torch leaves it.

    Raises:
        CheckpointError: a sharded value lacks elements that this rank owns.
    """
    remedy = "Fill optimizer.state_dict() of this run by torch.distributed.checkpoint.load, and load that"
    for piece in params.pieces():
        name, wanted = piece.shard.name, piece.piece.in_global
        for key, value in given[name].values.items():
            parts = value.parts if isinstance(value, ShardedValue) else [value]
            boxes = value.boxes if isinstance(value, ShardedValue) else (Box.whole(value.shape),)
            chunks = [Chunk(box, number, 0, 0) for number, box in enumerate(boxes)]
            what = f"{key} of {name!r} in the state dict"
            for chunk, target in find_targets(piece, key, wanted, chunks, what, remedy):
                if key != MAIN_PARAM or piece.flat.owns_memory:
                    yield Read(key_of(key, name), chunk, value.dtype, (target,)), parts[chunk.file]


def _check_counts(params: TorchParams, given: Mapping[str, _GivenState]) -> None:
    """Checks that every param with moments has a count, and that the inner optimizer can have different counts."""
    optimizer = params.share.optimizer
    owned = {piece.shard.name for piece in params.pieces()}
    for name in sorted(owned):
        is_counted = is_adam(optimizer, params.number_of(name))
        if given[name].saved.kinds and given[name].step is None and is_counted:
            rule = f"hold {STEP}, which counts the updates of the param"
            raise CheckpointError(refusal(f"state of {name!r} in the state dict", f"without {STEP}", rule, _REMEDY))
    for group in optimizer.plan.groups:
        begun = {name: _without_begin(params, name, given[name]).step for name in group.names if name in owned}
        check_steps(optimizer, begun, "updates in the state dict")


def _told(
    params: TorchParams, state_dict: Mapping[str, Any], given: Mapping[str, _GivenState]
) -> dict[str, tuple[object, ...]]:
    """What other ranks that own a part of the same param must be given alike: see `_WHATS`."""
    options = {
        name: repr(sorted((key, plain_option(each)) for key, each in _options(group).items()))
        for group, names in zip(state_dict["param_groups"], params.names, strict=True)
        for name in names
    }
    found: dict[str, tuple[object, ...]] = {}
    for name in dict.fromkeys(piece.shard.name for piece in params.pieces()):
        kinds = sorted(given[name].values)
        found[params.share.placements[name].name] = (given[name].step, kinds, options[name])
    return found


def _check_agreement(told: Iterable[Mapping[str, tuple[object, ...]]]) -> None:
    """Raises the same error on all ranks where two were given different states."""
    known: dict[str, tuple[int, tuple[object, ...]]] = {}
    for rank, of_rank in enumerate(told):
        for name, said in of_rank.items():
            first, before = known.setdefault(name, (rank, said))
            if before != said:
                what = next(what for what, a, b in zip(_WHATS, before, said, strict=True) if a != b)
                place = _WHATS.index(what)
                got = f"{what} {before[place]} on rank {first} and {said[place]} on rank {rank}"
                rule, remedy = "be the same on all ranks", "Load one state on all ranks"
                raise CheckpointError(refusal(f"state of {name!r} in the state dicts", got, rule, remedy))


def _take_options(params: TorchParams, groups: Sequence[Mapping[str, Any]]) -> None:
    for current, saved in zip(params.groups, groups, strict=True):
        for key, value in _options(saved).items():
            current[key] = as_kept(plain_option(value), current.get(key))


def _take_states(params: TorchParams, given: Mapping[str, _GivenState]) -> None:
    given = {name: _without_begin(params, name, each) for name, each in given.items()}
    matches = [_match(params, number, given) for number in range(len(params.share.optimizer.plan.groups))]
    separate(matches)
    fill_groups(matches, _reads(params, given), main_kind=MAIN_PARAM)
    for match in matches:
        if not is_torchs(match.optimizer.inner):
            _take_kept_once(match, given)
    params.share.optimizer.forget_deferred_check()


def _take_kept_once(match: GroupMatch, given: Mapping[str, _GivenState]) -> None:
    """Puts tensors that a class of the user's keeps once back as they were; counts stay on the CPU, as in torch."""
    for flat in flat_params_of(match.optimizer, match.number):
        state = match.optimizer.inner.state.get(flat.main, {})
        for key, value in given[flat.plan.shards[0].name].scalars.items():
            if key in state and torch.is_tensor(value):
                state[key] = value.to(value.device if key == STEP else flat.main.device, copy=True)


def _match(params: TorchParams, number: int, given: Mapping[str, _GivenState]) -> GroupMatch:
    """A group without options: the host takes those from `params.groups`."""
    names = params.share.optimizer.plan.groups[number].names
    return GroupMatch(params.share.optimizer, number, {}, {name: given[name].saved for name in names})
