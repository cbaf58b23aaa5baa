"""What this rank reads of a checkpoint: found and checked on all ranks before anything is changed
on one.

[Note: another kind of optimizer] A param that Muon updates and another optimizer has updated, or
the other way round, keeps its main param and nothing else: SGD and Muon have a momentum of the same
name that is not the same, and each needs an lr of its own. Its moments and its count begin anew,
its options stay those of the run, and the load says so. The same holds for optimizers that update
whole params: no other class understands their state, and it cannot be cut. The state of a param
that tensor-parallel ranks share fits only as many ranks and the same shape.

[Note: another class] The state of any other class is refused, even if its tensors have the names of
the run's: Lion's `exp_avg` is not Adam's. The manifest names the inner optimizer, and all
implementations of Adam, with whichever kind of decay, are one class. A param that had no state
begins anew, as above."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.boxes import covering
from megatron_distopt.checkpoint.manifest import MAIN, Chunk, Manifest, key_of, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import (
    GroupRecord,
    Scalar,
    check_types,
    differences,
    given_alike,
)
from megatron_distopt.checkpoint.whole_model import (
    OwnedPiece,
    Share,
    WholeModel,
    is_owned,
    is_owned_part,
    owned_pieces,
)
from megatron_distopt.config import ADAM_NAMES
from megatron_distopt.errors import CheckpointError, some_of
from megatron_distopt.layout import Box, Placement
from megatron_distopt.optimizer.averages import AVERAGE
from megatron_distopt.optimizer.inner import part_for
from megatron_distopt.optimizer.inner_state import counts_in_groups
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.owners.sharded_muon import ShardedMuon
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_log = logging.getLogger("megatron_distopt")
#: Names of inner optimizers that compute the same.
_ADAMS = frozenset((*ADAM_NAMES, torch.optim.Adam.__name__, torch.optim.AdamW.__name__))
MOMENTS_OF_ADAM = frozenset(("exp_avg", "exp_avg_sq"))
#: The class of inner optimizers that have other names.
_CLASSES = {**dict.fromkeys(("adam", *_ADAMS), "Adam"), "torch_sgd": "SGD"}


@dataclass(frozen=True)
class SavedState:
    """What is saved of the state of one param; the params of a flat param must have it in
    common."""

    step: int | None = None  # updates so far; None where they are not counted, or there were none
    # what the inner optimizer keeps once for the param
    scalars: tuple[tuple[str, Scalar], ...] = ()
    # names and dtypes of the moments; empty without state
    kinds: tuple[tuple[str, torch.dtype], ...] = ()


@dataclass(frozen=True, eq=False)
class SavedParam:
    """What a checkpoint has for one param of the run."""

    name: str  # in the checkpoint
    group: GroupRecord
    state: SavedState  # empty where it begins anew
    owned: tuple[str, ...]  # keys of what the owner of the whole param keeps
    begins_anew: bool = False  # see [Note: another kind of optimizer]


@dataclass(frozen=True, eq=False)
class GroupMatch:
    """A param group of the run, and what is saved for it."""

    optimizer: ShardedOptimizer
    number: int  # of the group in the optimizer
    options: Mapping[str, Any]
    states: Mapping[str, SavedState]  # by the params' names in the optimizer
    is_same_class: bool = True  # whether the inner optimizer computes what the saved one did
    kept: frozenset[str] = frozenset()  # options that stay as the run has them
    given_alike: frozenset[str] = frozenset()  # options that the user has not changed

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.inner.param_groups[self.number]

    @property
    def step(self) -> int | None:
        """The largest count of updates of its params."""
        return max(
            (state.step for state in self.states.values() if state.step is not None), default=None
        )

    def differences(self) -> Iterator[str]:
        """What a load has to say about options."""
        silent = self.optimizer.plan.choice.writes | self.given_alike
        return differences(self.group, self.options, self.kept, silent)


@dataclass(frozen=True, eq=False)
class Read:
    """Elements that one stored chunk has of a piece of the state."""

    key: str  # of the stored tensor
    chunk: Chunk  # a box of that tensor
    box: Box  # the elements, in the whole param
    piece: OwnedPiece  # takes them

    @property
    def in_chunk(self) -> Box:
        return self.box.relative_to(self.chunk.box.offsets)


@dataclass(frozen=True, eq=False)
class Loadable:
    """A state that can be loaded, wherever its tensors come from."""

    manifest: Manifest
    where: str  # the place of the state, for errors
    # the elements of each box, in the order of reads
    read: Callable[[Sequence[Read]], Iterator[tuple[Read, Tensor]]]
    # raises where something cannot be read; may keep it
    verify: Callable[[Sequence[Read]], None] = lambda reads: None
    # what the owner of a whole param keeps, by key; None without any
    read_owned: Callable[[str], Tensor] | None = None
    # values that must be equal on all ranks that are given them, by name
    alike: Mapping[str, str] = field(default_factory=dict)
    # whether model params become those of the state; else they are loaded by themselves
    has_model_params: bool = True
    remedy: str = ""  # for errors about missing params; empty to suggest another checkpoint


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Everything that this rank reads of a state."""

    state: Loadable
    model: WholeModel
    saved: Mapping[str, SavedParam]  # by the params' names in the whole model of the run
    groups: tuple[GroupMatch, ...]  # of the run, as far as something is saved for them
    reads: tuple[Read, ...]  # in the order of files and of the bytes in them


def plan_load(state: Loadable, model: WholeModel, names: Iterable[str]) -> LoadPlan:
    """Finds everything that this rank owns in a state; `names` are those of all ranks, in the model
    of the run."""
    _check_no_others(state, model, names)
    saved_names = _saved_names(state.manifest, model)
    saved = _saved_params(state, model, saved_names)
    group_of = {
        name: group
        for group in (*state.manifest.untrained, *state.manifest.groups)
        for name in group.names
    }
    untrained = {name: group_of[there] for name, there in saved_names.items() if there in group_of}
    groups = [
        match
        for share in model.shares
        for number in range(len(share.optimizer.plan.groups))
        if (match := _match_group(share, number, saved, untrained, state, model)) is not None
    ]
    return LoadPlan(state, model, saved, tuple(groups), plan_reads(state, saved, model))


def plan_reads(
    state: Loadable, saved: Mapping[str, SavedParam], model: WholeModel
) -> tuple[Read, ...]:
    """Finds the chunks that hold the elements of this rank's flat params, as they are cut now."""
    reads = []
    remedy = _another(state, model)
    for piece in owned_pieces(model):
        param = saved[piece.placement.name]
        kinds = [MAIN, *(kind for kind, _ in param.state.kinds)]
        if state.manifest.has_averages and piece.flat.average is not None:
            kinds.append(AVERAGE)
        for kind in kinds:
            key = key_of(kind, param.name)
            record = state.manifest.tensors[key]
            what = f"Tensor {key!r} in checkpoint {state.where}"
            wanted = _wanted(piece, record.shape, what, remedy)
            if wanted is not None:
                boxes = [chunk.box for chunk in record.chunks]
                for number, box in covering(wanted, boxes, what, remedy):
                    reads.append(Read(key, record.chunks[number], box, piece))
    return tuple(sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start)))


def _wanted(piece: OwnedPiece, shape: tuple[int, ...], what: str, remedy: str) -> Box | None:
    """The elements of a piece that a tensor has to hold; None where the piece is padding that it
    lacks."""
    ours = piece.placement.global_shape
    is_padding_alone = (
        piece.placement.is_padded and shape[1:] == ours[1:] and len(shape) == len(ours)
    )
    if shape != ours and not is_padding_alone:
        raise CheckpointError(
            f"{what} has shape {list(shape)}, and the run needs shape {list(ours)}. {remedy}."
        )
    return piece.piece.in_global.intersect(Box.whole(shape))


def _another(state: Loadable, model: WholeModel) -> str:
    return state.remedy or f"Load a checkpoint of this model, or {model.from_weights}"


def _canonical(names: Iterable[str], model: WholeModel) -> dict[str, str]:
    """The canonical name of each name; a name itself where another one has the same canonical
    name."""
    canonical = {name: model.canonical(name) for name in names}
    counts = Counter(canonical.values())
    return {name: each if counts[each] == 1 else name for name, each in canonical.items()}


def _check_no_others(state: Loadable, model: WholeModel, names: Iterable[str]) -> None:
    known = set(_canonical([*names, *model.frozen], model).values())
    others = [
        name
        for name, canonical in _canonical(state.manifest.names, model).items()
        if canonical not in known
    ]
    if others:
        raise CheckpointError(
            f"Checkpoint {state.where} has {some_of(others)}, which the model does not have. "
            f"{_another(state, model)}."
        )


def _saved_names(manifest: Manifest, model: WholeModel) -> dict[str, str]:
    """The names in the checkpoint of those params of this rank, frozen ones included, that it
    knows."""
    in_groups = (name for group in (*manifest.groups, *manifest.untrained) for name in group.names)
    saved = {
        canonical: name
        for name, canonical in _canonical([*manifest.names, *in_groups], model).items()
    }
    names = [placement.name for share in model.shares for placement in share.placements.values()]
    ours = _canonical([*names, *model.frozen], model)
    return {name: saved[canonical] for name, canonical in ours.items() if canonical in saved}


def _saved_params(
    state: Loadable, model: WholeModel, saved_names: Mapping[str, str]
) -> dict[str, SavedParam]:
    """What a checkpoint has for the params that this rank updates, by their names in the whole
    model."""
    manifest = state.manifest
    group_of = {name: group for group in manifest.groups for name in group.names}
    keys: dict[str, list[str]] = {name: [] for name in manifest.names}
    for key in manifest.tensors:
        keys.get(name_of(key), []).append(key)
    updated = [
        (share.placements[name], current, share.optimizer)
        for share in model.shares
        for group, current in zip(
            share.optimizer.plan.groups, share.optimizer.inner.param_groups, strict=False
        )
        for name in group.names
    ]
    found = {}
    for placement, current, optimizer in updated:
        name = saved_names.get(placement.name, "")
        if name not in keys or name not in group_of:
            fault = f"has no param {placement.name!r}, which this run updates"
            if name in keys:
                fault = f"has param {name!r} in no param group"
            raise CheckpointError(f"Checkpoint {state.where} {fault}. {_another(state, model)}.")
        group, owned = group_of[name], tuple(filter(is_owned, keys[name]))
        kinds = {
            kind_of(key): getattr(torch, manifest.tensors[key].dtype)
            for key in keys[name]
            if not is_owned(key)
        }
        moments = tuple(
            sorted((kind, dtype) for kind, dtype in kinds.items() if kind not in (MAIN, AVERAGE))
        )
        saved = SavedParam(
            name,
            group,
            SavedState(group.step, tuple(sorted(group.scalars.items())), moments),
            owned,
        )
        if _begins_anew(saved, state, placement, current, optimizer, model.from_weights):
            saved = SavedParam(name, group, SavedState(), (), begins_anew=True)
        found[placement.name] = replace(
            saved, owned=tuple(key for key in saved.owned if is_owned_part(key, placement))
        )
    return found


def _begins_anew(
    saved: SavedParam,
    state: Loadable,
    placement: Placement,
    current: Mapping[str, Any],
    optimizer: ShardedOptimizer,
    from_weights: str,
) -> bool:
    """Whether nothing saved but the main param is of use, see [Note: another kind of optimizer].

    Raises:
        CheckpointError: it is the state of [Note: another class].
    """
    if saved.group.options and is_muons_group(saved.group.options) != is_muons_group(current):
        return True
    choice, other = optimizer.plan.choice, class_of(state.manifest.inner)
    is_other = other != class_of(choice.name) and not is_muons_group(current)
    if is_other and saved.state.kinds and not choice.updates_whole_params:
        where, ours = f"checkpoint {state.where}", class_of(choice.name)
        raise another_class(where, other, ours, from_weights)
    if is_other or not choice.updates_whole_params:
        return is_other or bool(saved.owned)
    main = state.manifest.tensors[key_of(MAIN, saved.name)]
    is_cut_alike = main.shape == placement.global_shape and any(
        is_owned_part(key, placement) for key in saved.owned
    )
    return bool(saved.owned) and not is_cut_alike


def class_of(inner: str) -> str:
    """The class of an inner optimizer; of one beside Muon, that of the other params.

    >>> class_of("pytorch_optimizer:SOAP"), class_of("torch_muon and torch_fused")
    ('SOAP', 'Adam')
    """
    name = inner.rpartition(" and ")[2].rpartition(":")[2]
    return _CLASSES.get(name, name)


def another_class(what: str, other: str, ours: str, from_weights: str) -> CheckpointError:
    """The error of [Note: another class]."""
    return CheckpointError(
        f"The {what} has the state of {other}, but the optimizer of this run is {ours}. Resume "
        f"with the optimizer of the saved run, or {from_weights}."
    )


def _match_group(
    share: Share,
    number: int,
    saved: Mapping[str, SavedParam],
    untrained: Mapping[str, GroupRecord],
    state: Loadable,
    model: WholeModel,
) -> GroupMatch | None:
    """What is saved for a param group; None where nothing is.

    A group of frozen params has options and no state. The options matter once one of the params is
    unfrozen.
    """
    optimizer, where = share.optimizer, state.where
    params = {
        name: saved[share.placements[name].name] for name in optimizer.plan.groups[number].names
    }
    records = {
        share.placements[name].name: param.group
        for name, param in params.items()
        if not param.begins_anew
    }
    if not params:
        records = {
            name: untrained[name] for name in share.untrained.get(number, ()) if name in untrained
        }
        if not records:
            return None
    first = next(iter(records), "")
    for name, record in records.items():
        if record.options != records[first].options:
            raise CheckpointError(
                f"In checkpoint {where}, {first!r} and {name!r} are in groups of different "
                "options, but in this run they are in one param group. Build the optimizer with "
                "the param groups of the saved run."
            )
    if records:
        _check_options(optimizer, number, records[first], where)
    states = {name: param.state for name, param in params.items()}
    by_global_name = {share.placements[name].name: each for name, each in states.items()}
    _check_kinds(optimizer, number, by_global_name, where, model.from_weights)
    steps = {
        name: 0 if saved[name].begins_anew else each.step for name, each in by_global_name.items()
    }
    check_steps(optimizer, steps, where)
    inner = optimizer.plan.choice.name
    is_same = state.manifest.inner == inner or {state.manifest.inner, inner} <= _ADAMS
    record = records[first] if records else GroupRecord((), {})
    alike = given_alike(record, optimizer.plan.groups[number].options)
    return GroupMatch(optimizer, number, record.options, states, is_same, model.kept_options, alike)


def needed_moments(optimizer: ShardedOptimizer, number: int) -> frozenset[str]:
    """The moments that the inner optimizer needs for an updated param of a group; empty where that
    is not known.

    `plan.choice.moments` does not say it of an instance that the user gave, so its class is asked.
    """
    updater = part_for(optimizer.inner, optimizer.inner.param_groups[number])
    if isinstance(updater, (torch.optim.Adam, torch.optim.AdamW)):
        return MOMENTS_OF_ADAM
    if isinstance(updater, (torch.optim.SGD, ShardedMuon)):
        return frozenset(("momentum_buffer",))
    return optimizer.plan.choice.moments


def _check_options(
    optimizer: ShardedOptimizer, number: int, saved: GroupRecord, where: str
) -> None:
    """Checks the types of saved options, and that the run has those which no file keeps, such as
    functions."""
    current = optimizer.inner.param_groups[number]
    place = f"of the params of group {number} in checkpoint {where}"
    check_types(saved.options, current, place, "Load another checkpoint")
    for key, type_name in saved.unsaved.items():
        if key not in current:
            raise CheckpointError(
                f"{key} {place} was a {type_name}, which no file can keep. Put {key} into the "
                "param group of this run before the load."
            )
        _log.warning(
            "param group option %r was a %s, which no file can keep; this run keeps its own value",
            key,
            type_name,
        )


def _check_kinds(
    optimizer: ShardedOptimizer,
    number: int,
    states: Mapping[str, SavedState],
    where: str,
    from_weights: str,
) -> None:
    """Checks that all updated params of a group have the same moments, and those that the inner
    optimizer needs."""
    wanted = needed_moments(optimizer, number)
    usual = next((state.kinds for state in states.values() if state.kinds), ())
    for name, state in states.items():
        kinds = dict(state.kinds).keys()
        has_begun = bool(kinds) or bool(state.step)
        if (kinds and state.kinds != usual) or (has_begun and not wanted <= kinds):
            needed = ", ".join(sorted(wanted | dict(usual).keys()))
            raise CheckpointError(
                f"Checkpoint {where} has {', '.join(sorted(kinds)) or 'nothing'} of {name!r} "
                f"besides the param, and {optimizer.plan.choice.name} needs {needed}. Resume with "
                f"the optimizer of the saved run, or {from_weights}."
            )


def check_steps(optimizer: ShardedOptimizer, steps: Mapping[str, int | None], where: str) -> None:
    """Checks that the inner optimizer can count the updates of each param by itself, where those of
    a group differ."""
    name_by_step = {step: name for name, step in steps.items() if step is not None}
    if len(name_by_step) > 1 and counts_in_groups(optimizer.plan.choice, optimizer.inner):
        (one, first), (other, second) = sorted(name_by_step.items())[:2]
        raise CheckpointError(
            f"Checkpoint {where} has {one} updates of {first!r} and {other} of {second!r}, but "
            f"{optimizer.plan.choice.name} has one count for all params of a group. Write "
            "adam='torch_fused' or adam='torch_foreach'."
        )
