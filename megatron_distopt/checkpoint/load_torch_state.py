"""Loading a state in torch's format: of torch's own optimizer, of torch.distributed.checkpoint, or
of this package."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.load import load_state
from megatron_distopt.checkpoint.load_plan import (
    Loadable,
    Read,
    another_class,
    class_of,
    needed_moments,
)
from megatron_distopt.checkpoint.manifest import (
    MAIN,
    Chunk,
    Manifest,
    TensorRecord,
    key_of,
    kind_of,
)
from megatron_distopt.checkpoint.manifest_text import check_counts
from megatron_distopt.checkpoint.param_groups import (
    LOSS_SCALE,
    GroupRecord,
    Options,
    Scalar,
    check_types,
    check_values,
    not_options,
    plain_options,
    take_options,
)
from megatron_distopt.checkpoint.torch_state import (
    CLASS,
    MAIN_PARAM,
    STEP,
    ShardedValue,
    StateDict,
    TorchParams,
    first_state,
    is_adam,
    is_unwritten,
)
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.owners.muon_options import is_muons_group

#: Options that tell torch's classes apart where their states have the same names.
_TELLING = {
    "amsgrad",
    "momentum_decay",
    "betas",
    "momentum",
    "alpha",
    "dampening",
    "rho",
    "lr_decay",
}
_REMEDY = "Load what optimizer.state_dict() of the same params in the same groups returned"


@dataclass(frozen=True, eq=False)
class _GivenState:
    """The state that is given for one param."""

    # with a value for each element, by kind; "main_param" is one of the kinds
    values: Mapping[str, Tensor]
    # what is kept once for the param, by key; the count of updates is one of them
    scalars: StateDict

    @property
    def moments(self) -> list[Tensor]:
        return [value for key, value in self.values.items() if key not in (MAIN_PARAM, AVERAGE)]

    @property
    def step(self) -> int | None:
        return int(self.scalars[STEP]) if STEP in self.scalars else None


@torch.no_grad()
def load_torch_state_dict(params: TorchParams, state_dict: StateDict) -> None:
    """Collective: loads a state in torch's format, after all ranks have checked theirs.

    Values are whole tensors, of which each rank takes what it owns, or sharded ones of this layout.
    Options of the param groups go into `params.groups`. Model params are left alone, as torch
    leaves them: a main param that does not round to its model param has to follow it before the
    next step.

    Args:
        params: of the optimizer; the load may cut flat params.
        state_dict: in torch's format; its params are numbers or names, in the order of the groups.

    Raises:
        CheckpointError: on a rank that cannot take its state; nothing is changed on any rank then.
        RanksDisagreeError: on the others, with that rank's text.
    """
    model = WholeModel([params.share])
    load_state(lambda: _loadable(params, state_dict), model, params.everyone)
    optimizer = params.share.optimizer
    pairs = []
    for current, saved in zip(params.groups, state_dict["param_groups"], strict=True):
        options = _options(params, saved, current)
        current.update({key: copy.deepcopy(saved[key]) for key in options if key not in current})
        pairs.append((current, options))
    take_options(pairs, params.everyone.rank, writes=optimizer.plan.choice.writes)
    optimizer.forget_deferred_check()


def names_with_state(params: TorchParams, state_dict: StateDict) -> list[str]:
    """Names of params that have a state in a state dict; none where a load would refuse the form of
    the dict."""
    try:
        _check_form(params, state_dict)
    except CheckpointError:
        return []
    return [name for name, entry in _entries(params, state_dict).items() if entry]


def _entries(params: TorchParams, state_dict: StateDict) -> dict[str, StateDict]:
    """The entry of each param, by its name here; empty where it has none."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    entries = (state_dict["state"].get(number) or {} for number in numbers)
    # For a key that a flat state lacks torch.distributed.checkpoint gives an empty dict.
    given = (
        {key: value for key, value in each.items() if not (isinstance(value, dict) and not value)}
        for each in entries
    )
    return dict(zip(params.numbered, given, strict=True))


def _loadable(params: TorchParams, state_dict: StateDict) -> Loadable:
    """Checks the state dict. The result has no options, because these go into the user's groups."""
    _check_form(params, state_dict)
    _check_options(params, state_dict["param_groups"])
    scale = _loss_scale_in(state_dict)
    num_skipped = scale.get("num_skipped", params.share.optimizer.num_skipped)
    check_counts(scale, num_skipped, "the state dict")
    states = _given_states(params, state_dict)
    tensors: dict[str, TensorRecord] = {}
    parts: dict[str, Sequence[Tensor]] = {}
    records = []
    for name, given in states.items():
        state, placement = _without_begin(params, name, given), params.share.placements[name]
        # If no main param is given, the present one stays and nothing is read for it.
        values = {MAIN_PARAM: torch.empty(placement.global_shape, device="meta"), **state.values}
        for kind, value in values.items():
            key = key_of(MAIN if kind == MAIN_PARAM else kind, placement.name)
            boxes, parts[key] = _parts_of(value)
            chunks = tuple(Chunk(box, 0, number, 0) for number, box in enumerate(boxes))
            tensors[key] = TensorRecord(placement.global_shape, "float32", chunks)
        scalars = {key: Scalar.of(value) for key, value in state.scalars.items()}
        record = GroupRecord((placement.name,), {}, state.step, scalars)
        records.append(record if state.moments else GroupRecord(record.names, {}))

    def read(reads: Sequence[Read]) -> Iterator[tuple[Read, Tensor]]:
        """An fp32 model param is its own main param; it is left alone, as torch leaves it."""
        for each in reads:
            part = parts[each.key][each.chunk.start]
            if kind_of(each.key) != MAIN or (each.piece.flat.owns_memory and not part.is_meta):
                yield each, part[each.in_chunk.as_slices()]

    inner = params.share.optimizer.plan.choice.name
    return Loadable(
        Manifest("", (), tensors, tuple(records), inner, scale, int(num_skipped)),
        "given as a state dict",
        read,
        alike=_to_agree_on(params, state_dict, states),
        has_model_params=False,
        remedy="Fill optimizer.state_dict() of this run by torch.distributed.checkpoint.load, and "
        "load that",
    )


def _given_states(params: TorchParams, state_dict: StateDict) -> dict[str, _GivenState]:
    """What the state dict has for each param of the sharded step, by name."""
    entries = _entries(params, state_dict)
    scalars = _scalar_keys(entries, params)
    given = {}
    for number, group in enumerate(state_dict["param_groups"]):
        begin = _first_state(params, number, group)
        for name in filter(params.trained.__contains__, params.names[number]):
            given[name] = _given(params, name, entries[name], scalars)
            _check_kinds(params, name, entries[name], begin)
    return given


def _check_form(params: TorchParams, state_dict: StateDict) -> None:
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        got = ", ".join(map(str, list(state_dict)[:5])) or "nothing"
        raise CheckpointError(
            f"The state dict has {got}, but no {' and no '.join(missing)}. {_REMEDY}."
        )
    numels = [len(group.get("params", ())) for group in state_dict["param_groups"]]
    ours = list(map(len, params.names))
    if numels != ours:
        raise CheckpointError(
            f"The param groups of the state dict have {numels} params, and those of the optimizer "
            f"have {ours}. {_REMEDY}."
        )


def _check_options(params: TorchParams, groups: Sequence[Options]) -> None:
    records = [
        GroupRecord((), _options(params, *each)) for each in zip(groups, params.groups, strict=True)
    ]
    check_values(records, "the state dict")
    for number, (record, current) in enumerate(zip(records, params.groups, strict=True)):
        place = f"of param group {number} in the state dict"
        check_types(record.options, current, place, _REMEDY)
        # SGD and Muon have a momentum of the same name, and AdamW and Muon have an lr, of which
        # each needs another one.
        if record.options and is_muons_group(record.options) != is_muons_group(current):
            whose = ["another optimizer", "Muon"]
            got, wanted = whose if is_muons_group(current) else whose[::-1]
            raise CheckpointError(
                f"The state {place} comes from {got}, and must come from {wanted}. Resume with "
                "the optimizer of the saved run, or start from its weights with a new one."
            )


def _options(params: TorchParams, group: Options, current: Options) -> dict[str, Any]:
    """The options that a load takes. One that is None is taken only if the group already has it,
    see `torch_state_dict`."""
    others = (*not_options(params.share.optimizer), "param_names", CLASS)
    taken = dict[str, Any]()
    for key, value in group.items():
        is_written = value is not None or key in current
        if is_written and key not in others:
            taken[key] = value
    return plain_options(taken)


def _loss_scale_in(state_dict: StateDict) -> dict[str, Any]:
    """The loss scale and its counts; empty in a state of other software, which leaves those of the
    run as they are."""
    for group in state_dict["param_groups"]:
        if LOSS_SCALE in group:
            return dict(group[LOSS_SCALE])
    return {}


def _scalar_keys(entries: Mapping[str, StateDict], params: TorchParams) -> set[str]:
    """Keys of values that a param has once: numbers, texts, and tensors of one element if the param
    has more."""
    found = {STEP}
    for name, entry in entries.items():
        placement = params.share.placements.get(name)
        has_more = placement is not None and math.prod(placement.global_shape) > 1
        found |= {
            key
            for key, value in entry.items()
            if torch.is_tensor(value) and value.numel() == 1 and has_more
        }
        found |= {
            key for key, value in entry.items() if value is not None and not torch.is_tensor(value)
        }
    needed = (needed_moments(params.share.optimizer, number) for number in range(len(params.names)))
    known = {key for first in params.first for key in first.values}
    kept = {key for first in params.first for key in first.moments}
    return (found | known) - kept.union(*needed) - {MAIN_PARAM, AVERAGE}


def _given(params: TorchParams, name: str, entry: StateDict, scalars: set[str]) -> _GivenState:
    shape = params.share.placements[name].global_shape
    values: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for key, value in entry.items():
        what = f"{key} of {name!r} in the state dict"
        if value is None or (key in scalars and isinstance(value, ShardedValue)):
            continue
        if key not in scalars:
            if not torch.is_tensor(value) or tuple(value.shape) != shape:
                got = (
                    f"a tensor of shape {list(value.shape)}"
                    if torch.is_tensor(value)
                    else f"a {type(value).__name__}"
                )
                raise CheckpointError(
                    f"{what} is {got}, and must be a tensor of shape {list(shape)}. {_REMEDY}."
                )
            parts = _parts_of(value)[1]
            # a rank without a part cannot tell, and goes with the others
            is_nan = bool(parts) and all(bool(part.isnan().all()) for part in parts)
            if key != AVERAGE or not is_nan:
                values[key] = value
            continue
        if key == STEP and not (_is_number(value) and float(value) >= 0):
            raise CheckpointError(
                f"{what} is {value!r}, and must be a number of at least 0. {_REMEDY}."
            )
        if not (_is_number(value) or isinstance(value, str)):
            raise CheckpointError(
                f"{what} is {value!r}, and must be a number or a text. {_REMEDY}."
            )
        numbers[key] = value
    return _GivenState(values, numbers)


def _is_number(value: object) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 1 and bool(torch.isfinite(value).all())
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _first_state(params: TorchParams, number: int, group: Options) -> StateDict:
    """The state of a param after its first update with the options of a saved group. Refuses a
    group of [Note: another class].

    If a group does not name its class, torch's classes are recognised by their options.
    """
    current, optimizer = params.groups[number], params.share.optimizer
    ours = class_of(optimizer.plan.choice.name)
    is_torchs = "foreach" in group and "foreach" in current
    is_like = not is_torchs or _TELLING & group.keys() == _TELLING & current.keys()
    other = group.get(CLASS, ours if is_like else "another class")
    if other != ours:
        raise another_class("state dict", other, ours, WholeModel.from_weights)
    options = {**current, **_options(params, group, current)}
    return first_state(optimizer, number, options).values


def _check_kinds(params: TorchParams, name: str, entry: StateDict, begin: StateDict) -> None:
    """Checks that a param has what the inner optimizer keeps, or nothing."""
    found = {key for key, value in entry.items() if value is not None} - {MAIN_PARAM, AVERAGE}
    moments = {key for key in found if torch.is_tensor(entry[key]) and entry[key].dim()}
    others = moments - begin.keys() - {"max_exp_avg_sq"}
    if found and (others or not begin.keys() <= found):
        raise CheckpointError(
            f"The state of {name!r} in the state dict has {', '.join(sorted(found))} besides the "
            f"param, and {params.share.optimizer.plan.choice.name} needs "
            f"{', '.join(sorted(begin)) or 'nothing'}. Load a state of the same class."
        )


def _without_begin(params: TorchParams, name: str, given: _GivenState) -> _GivenState:
    """Drops the state that `state_dict()` shows for a param that was never updated, because the
    optimizer has none for it."""
    parts = [part for value in given.moments for part in _parts_of(value)[1]]
    is_begin = given.step == 0 and is_adam(params.share.optimizer, params.number_of[name])
    is_zero = is_begin and not any(bool(part.count_nonzero()) for part in parts)
    if not is_zero and not is_unwritten(given.values):
        return given
    kept = {key: value for key, value in given.values.items() if key in (MAIN_PARAM, AVERAGE)}
    return _GivenState(kept, {})


def _parts_of(value: Tensor) -> tuple[Sequence[Box], Sequence[Tensor]]:
    """The boxes of a value that are here, and the elements of each."""
    return (
        (value.boxes, value.parts)
        if isinstance(value, ShardedValue)
        else ([Box.whole(value.shape)], [value])
    )


def _to_agree_on(
    params: TorchParams, state_dict: StateDict, given: Mapping[str, _GivenState]
) -> dict[str, str]:
    """Values that must be equal on all ranks that own a part of the same param or have a param in
    the same group."""
    alike = {LOSS_SCALE: repr(sorted(_loss_scale_in(state_dict).items()))}
    for names, group, current in zip(
        params.names, state_dict["param_groups"], params.groups, strict=True
    ):
        trained = [params.share.placements[name].name for name in names if name in given]
        if trained:
            options = sorted(_options(params, group, current).items())
            alike[f"param group of {trained[0]!r}"] = repr(options)
    for name in given.keys() & params.pieces.keys():
        of_param = repr(params.share.placements[name].name)
        alike[f"step of {of_param}"] = str(given[name].step)
        alike[f"state of {of_param}"] = ", ".join(sorted(given[name].values))
    return alike
