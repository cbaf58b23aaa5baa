"""What this rank has to read, planned and checked before anything is changed.

[Note: another kind of optimizer] A param that Muon updates and another optimizer has updated, or the other way round,
keeps its main param and nothing else: SGD and Muon have a momentum of the same name that is not the same, and each
needs an lr of its own. Its moments and its count begin anew, its options stay those of the run, and the load says so.
The same holds for optimizers that update whole params, each of which keeps what no other one understands and nobody
else can cut: the state of a param that tensor-parallel ranks share is for as many ranks, and for the shape that it had.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_distopt.checkpoint.manifest import MAIN, Chunk, Manifest, TensorRecord, key_of, kind_of, name_of, some_of
from megatron_distopt.checkpoint.owned_state import is_owned, is_owned_part, owned_by_name
from megatron_distopt.checkpoint.param_groups import GroupRecord, Scalar, check_types
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box, Placement
from megatron_distopt.optimizer import FlatMuon, ShardedOptimizer, is_muons_group, is_torchs, part_for

__all__ = [
    "GroupMatch",
    "LoadPlan",
    "Read",
    "ReadTarget",
    "SavedState",
    "check_names",
    "check_steps",
    "find_targets",
    "needed_moments",
    "plan_load",
]

_log = logging.getLogger("megatron_distopt")


def _another(model: WholeModel) -> str:
    """The remedy where the checkpoint is of another model."""
    return f"Load a checkpoint of this model, or {model.from_weights}"


@dataclass(frozen=True, eq=False)
class ReadTarget:
    """Where a part of what is read goes.

    Args:
        piece: of the state.
        kind: of the tensor: "main", or the inner optimizer's name for what it keeps.
        in_chunk: the part of the tensor that is read.
        in_piece: the same elements in the piece.
    """

    piece: OwnedPiece
    kind: str
    in_chunk: Box
    in_piece: Box


@dataclass(frozen=True, eq=False)
class Read:
    """One tensor to read from a file, and the places that its elements go to."""

    key: str
    chunk: Chunk
    dtype: torch.dtype
    targets: tuple[ReadTarget, ...]


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint says of the state of one param; the params of a flat param must have it in common.

    Args:
        step: updates so far; None where they are not counted, or there were none.
        scalars: see `GroupRecord.scalars`.
        kinds: names and dtypes of the moments; empty for a param without state.
    """

    step: int | None
    scalars: tuple[tuple[str, Scalar], ...]
    kinds: tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True, eq=False)
class GroupMatch:
    """A param group of the run, and what the checkpoint has for its params.

    Args:
        optimizer: has the group.
        number: of the group in the optimizer.
        options: saved, the same for all params of the group.
        states: by the params' names in the optimizer.
    """

    optimizer: ShardedOptimizer
    number: int
    options: Mapping[str, Any]
    states: Mapping[str, SavedState]

    @property
    def step(self) -> int | None:
        """The largest count of updates of its params."""
        return max((state.step for state in self.states.values() if state.step is not None), default=None)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Everything that this rank reads.

    Args:
        manifest: of the checkpoint.
        reads: in the order of files and of the bytes in them.
        groups: of the run, as far as the checkpoint has something for them.
        anew: names of params of this rank whose state begins anew, see [Note: another kind of optimizer].
        owned: what owners of whole params read, without targets, in the order of `reads`; each with the param's name.
    """

    manifest: Manifest
    reads: tuple[Read, ...]
    groups: tuple[GroupMatch, ...]
    anew: tuple[str, ...] = ()
    owned: Mapping[Read, str] = field(default_factory=dict)


def plan_load(manifest: Manifest, where: str, model: WholeModel) -> LoadPlan:
    """Finds in a checkpoint everything that this rank owns.

    Args:
        manifest: of the checkpoint.
        where: its path, for errors.
        model: will take the state.

    Raises:
        CheckpointError: a param is missing, has another shape, or its group is ambiguous.
    """
    saved = _SavedByName(manifest, where, model)
    groups = tuple(match for share in model.shares for match in _match_groups(share, saved))
    targets: dict[tuple[str, Chunk], list[ReadTarget]] = {}
    for piece in owned_pieces(model):
        for key, chunk, target in _targets_of(piece, saved):
            targets.setdefault((key, chunk), []).append(target)
    reads = [
        Read(key, chunk, getattr(torch, manifest.tensors[key].dtype), tuple(found))
        for (key, chunk), found in targets.items()
    ]
    owned = {read: name for share in model.shares for name, read in _owned_reads(share, saved)}
    return LoadPlan(manifest, _in_order(reads), groups, saved.anew, {read: owned[read] for read in _in_order(owned)})


def _in_order(reads: Iterable[Read]) -> tuple[Read, ...]:
    return tuple(sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start)))


def _owned_reads(share: Share, saved: _SavedByName) -> Iterator[tuple[str, Read]]:
    """What this rank reads of params that it owns whole, with their names in the whole model."""
    mine = owned_by_name(share)
    for placement in share.placements.values():
        for key in saved.owned_of(placement) if placement.name in mine else ():
            record = saved.manifest.tensors[key]
            for chunk in record.chunks:
                yield placement.name, Read(key, chunk, getattr(torch, record.dtype), ())


def check_names(manifest: Manifest, where: str, model: WholeModel, wanted: Iterable[str]) -> None:
    """Checks that the checkpoint has no params that the model does not have.

    Args:
        manifest: of the checkpoint.
        where: its path, for errors.
        model: of the run.
        wanted: names in the whole model of the params of all ranks.

    Raises:
        CheckpointError
    """
    known = set(_canonical([*wanted, *model.frozen], model).values())
    foreign = [name for name, canonical in _canonical(manifest.names, model).items() if canonical not in known]
    if foreign:
        got = f"{some_of(foreign)}, which the model does not have"
        raise CheckpointError(refusal(f"checkpoint {where}", got, "hold the params of the run", _another(model)))


def _canonical(names: Iterable[str], model: WholeModel) -> dict[str, str]:
    """The canonical name of each name; a name itself where another one has the same canonical name."""
    canonical = {name: model.canonical(name) for name in names}
    counts = Counter(canonical.values())
    return {name: each if counts[each] == 1 else name for name, each in canonical.items()}


class _SavedByName:
    """What a checkpoint holds, looked up by the names of the run.

    Args: as of `plan_load`.
    """

    def __init__(self, manifest: Manifest, where: str, model: WholeModel) -> None:
        self.manifest, self.where = manifest, where
        self._name_of = {canonical: name for name, canonical in _canonical(manifest.names, model).items()}
        here = [each.name for share in model.shares for each in share.placements.values()]
        self._canonical = _canonical([*here, *model.frozen], model)
        self.another = _another(model)
        self.from_weights = model.from_weights
        self._kinds: dict[str, dict[str, torch.dtype]] = {name: {} for name in manifest.names}
        self._owned: dict[str, list[str]] = {name: [] for name in manifest.names}
        for key, record in manifest.tensors.items():
            if is_owned(key):
                self._owned.get(name_of(key), []).append(key)
            else:
                self._kinds.get(name_of(key), {})[kind_of(key)] = getattr(torch, record.dtype)
        self._group_of = {name: group for group in manifest.groups for name in group.names}
        resting = {name: group for group in manifest.resting for name in group.names}
        by_canonical = {canonical: name for name, canonical in _canonical([*manifest.names, *resting], model).items()}
        known = {**resting, **self._group_of}
        self._settings = {each: known[name] for each, name in by_canonical.items() if name in known}
        self._anew = {
            placement.name: None
            for placement, group, optimizer in _updated(model)
            if self._crosses(placement, group, optimizer)
        }

    def _crosses(self, placement: Placement, current: Mapping[str, Any], optimizer: ShardedOptimizer) -> bool:
        """See [Note: another kind of optimizer]."""
        name = self._name_of.get(self._canonical[placement.name], "")
        record = self._group_of.get(name)
        if record is not None and record.options and is_muons_group(record.options) != is_muons_group(current):
            return True
        if not optimizer.plan.choice.updates_whole_params:
            return bool(self._owned.get(name))
        is_same_class = class_of(self.manifest.inner) == class_of(optimizer.plan.choice.name)
        return not is_same_class or not self._is_cut_alike(name, placement)

    def _is_cut_alike(self, name: str, placement: Placement) -> bool:
        """Whether what owners saved of a param is for a part like that of this rank; also where they saved nothing."""
        kept, main = self._owned.get(name, []), self.manifest.tensors.get(key_of(MAIN, name))
        has_shape = main is None or main.shape == placement.global_shape
        return not kept or (has_shape and any(is_owned_part(key, placement) for key in kept))

    def owned_of(self, placement: Placement) -> Sequence[str]:
        """The keys of what the owner of a whole param has saved; empty where the state of the param begins anew."""
        if self.begins_anew(placement):
            return ()
        return [key for key in self._owned[self.name_of(placement)] if is_owned_part(key, placement)]

    @property
    def anew(self) -> tuple[str, ...]:
        """See `LoadPlan`."""
        return tuple(self._anew)

    def begins_anew(self, placement: Placement) -> bool:
        """See [Note: another kind of optimizer]."""
        return placement.name in self._anew

    def name_of(self, placement: Placement) -> str:
        """The name that the checkpoint has for a param."""
        name = self._name_of.get(self._canonical[placement.name])
        if name is None:
            got = f"without param {placement.name!r}"
            raise CheckpointError(refusal(f"checkpoint {self.where}", got, "hold the params of the run", self.another))
        return name

    def group_of(self, placement: Placement) -> GroupRecord:
        """The group in which a param was saved."""
        name = self.name_of(placement)
        if name not in self._group_of:
            got = f"param {name!r} in no group"
            raise CheckpointError(
                refusal(f"checkpoint {self.where}", got, "name the group of every param", self.another)
            )
        return self._group_of[name]

    def resting_of(self, name: str) -> GroupRecord | None:
        """The group of a param that has no state in the run; None where the checkpoint does not have the param."""
        return self._settings.get(self._canonical[name])

    def state_of(self, placement: Placement) -> SavedState:
        """The count, the numbers and the moments of a param."""
        if self.begins_anew(placement):
            return SavedState(None, (), ())
        group, kinds = self.group_of(placement), self.kinds_of(placement)
        return SavedState(group.step, tuple(sorted(group.scalars.items())), tuple(sorted(kinds.items())))

    def kinds_of(self, placement: Placement) -> dict[str, torch.dtype]:
        """Names and dtypes of the moments of a param."""
        kinds = self._kinds[self.name_of(placement)]
        return {kind: dtype for kind, dtype in kinds.items() if kind != MAIN and not self.begins_anew(placement)}


def class_of(inner: str) -> str:
    """The name of a class that was given as an object, or asked for as module:Class.

    >>> class_of("pytorch_optimizer:SOAP")
    'SOAP'
    """
    return inner.rpartition(":")[2]


def _updated(model: WholeModel) -> Iterator[tuple[Placement, Mapping[str, Any], ShardedOptimizer]]:
    """Params that are updated, each with its param group and its optimizer."""
    for share in model.shares:
        pairs = zip(share.optimizer.plan.groups, share.optimizer.inner.param_groups, strict=False)
        for group, current in pairs:
            yield from ((share.placements[name], current, share.optimizer) for name in group.names)


def _match_groups(share: Share, saved: _SavedByName) -> Iterator[GroupMatch]:
    for number, group in enumerate(share.optimizer.plan.groups):
        if not group.names:
            yield from _match_resting(share, number, saved)
            continue
        placements = {name: share.placements[name] for name in group.names}
        kept = [placement for placement in placements.values() if not saved.begins_anew(placement)]
        options = {placement.name: saved.group_of(placement) for placement in kept}
        if options:
            _check_one_group(share.optimizer, number, options, saved.where)
        states = {name: saved.state_of(placement) for name, placement in placements.items()}
        _check_kinds(share.optimizer, number, placements, states, saved)
        steps = {
            placement.name: 0 if saved.begins_anew(placement) else states[name].step
            for name, placement in placements.items()
        }
        check_steps(share.optimizer, steps, f"updates in checkpoint {saved.where}")
        yield GroupMatch(share.optimizer, number, next((each.options for each in options.values()), {}), states)


def _match_resting(share: Share, number: int, saved: _SavedByName) -> Iterator[GroupMatch]:
    """A group of frozen params has options and no state. The options matter once one of the params is unfrozen."""
    found = {name: saved.resting_of(name) for name in share.resting.get(number, ())}
    options = {name: group for name, group in found.items() if group is not None}
    if options:
        _check_one_group(share.optimizer, number, options, saved.where)
        yield GroupMatch(share.optimizer, number, next(iter(options.values())).options, {})


def _check_one_group(optimizer: ShardedOptimizer, number: int, groups: Mapping[str, GroupRecord], where: str) -> None:
    """Checks that params of one group in the run were saved with equal options."""
    first = next(iter(groups))
    for name, group in groups.items():
        if group.options != groups[first].options:
            rule = "have been in groups of equal options, because they are in one here"
            got = f"{first!r} and {name!r} in different groups"
            remedy = "Build the optimizer with the param groups of the saved run"
            raise CheckpointError(refusal(f"param groups in checkpoint {where}", got, rule, remedy))
    _check_options(optimizer, number, groups[first], where)


def needed_moments(optimizer: ShardedOptimizer, number: int) -> frozenset[str]:
    """The moments that the inner optimizer needs for a param that it has updated; empty where that is not known.

    `plan.choice.moments` does not say it of an instance that the user gave, so its class is asked.

    Args:
        optimizer: the sharded step.
        number: of the param group.
    """
    updater = part_for(optimizer.inner, optimizer.inner.param_groups[number])
    if isinstance(updater, (torch.optim.Adam, torch.optim.AdamW)):
        return frozenset(("exp_avg", "exp_avg_sq"))
    if isinstance(updater, (torch.optim.SGD, FlatMuon)):
        return frozenset(("momentum_buffer",))
    return optimizer.plan.choice.moments


def _check_options(optimizer: ShardedOptimizer, number: int, saved: GroupRecord, where: str) -> None:
    """Checks the types of saved options, and that the run has those which no file keeps, such as functions."""
    current = optimizer.inner.param_groups[number]
    place = f"of the params of group {number} in checkpoint {where}"
    check_types(saved.options, current, place, "Load another checkpoint")
    for key, name in saved.unsaved.items():
        if key not in current:
            rule, remedy = "be in the param group of the run", f"Put {key} into the param group before the load"
            raise CheckpointError(refusal(f"{key} {place}", f"a {name}, which no file keeps", rule, remedy))
        _log.warning("param group option %r was a %s, which no file keeps; the run's own stays", key, name)


def _check_kinds(
    optimizer: ShardedOptimizer,
    number: int,
    placements: Mapping[str, Placement],
    states: Mapping[str, SavedState],
    saved: _SavedByName,
) -> None:
    """Checks that all updated params of a group have the same moments, and those that the inner optimizer needs."""
    wanted = needed_moments(optimizer, number)
    usual = next((state.kinds for state in states.values() if state.kinds), ())
    for name, state in states.items():
        found = {kind for kind, _ in state.kinds}
        has_begun = bool(found) or bool(state.step)
        if (found and state.kinds != usual) or (has_begun and not wanted <= found):
            what = f"state of {placements[name].name!r} in checkpoint {saved.where}"
            got = f"{', '.join(sorted(found)) or 'nothing'} besides the param"
            rule = f"hold {', '.join(sorted(wanted | dict(usual).keys()))} for {optimizer.plan.choice.name}"
            remedy = f"Resume with the optimizer of the saved run, or {saved.from_weights}"
            raise CheckpointError(refusal(what, got, rule, remedy))


def check_steps(optimizer: ShardedOptimizer, steps: Mapping[str, int | None], what: str) -> None:
    """Checks that the inner optimizer can count the updates of each param by itself, where the counts differ.

    Args:
        optimizer: will take the state.
        steps: updates of the params of one group, by name.
        what: what errors call the counts.

    Raises:
        CheckpointError
    """
    counted = {step: name for name, step in steps.items() if step is not None}
    if len(counted) > 1 and not is_torchs(optimizer.inner):
        (one, first), (other, second) = sorted(counted.items())[:2]
        got = f"{one} of {first!r} and {other} of {second!r}"
        rule = f"be as many for all params of a group, for which {optimizer.plan.choice.name} has one count"
        raise CheckpointError(refusal(what, got, rule, "Write adam='torch_fused' or adam='torch_foreach'"))


def _targets_of(piece: OwnedPiece, saved: _SavedByName) -> Iterator[tuple[str, Chunk, ReadTarget]]:
    name = saved.name_of(piece.placement)
    for kind in (MAIN, *saved.kinds_of(piece.placement)):
        key = key_of(kind, name)
        record = saved.manifest.tensors[key]
        wanted = _wanted(piece, key, record, saved)
        what = f"tensor {key!r} in checkpoint {saved.where}"
        if wanted is not None:
            for chunk, target in find_targets(piece, kind, wanted, record.chunks, what, saved.another):
                yield key, chunk, target


def find_targets(
    piece: OwnedPiece, kind: str, wanted: Box, chunks: Iterable[Chunk], what: str, remedy: str
) -> Iterator[tuple[Chunk, ReadTarget]]:
    """Finds the chunks that hold elements of a piece.

    Args:
        piece: of the state.
        kind: "main", or the inner optimizer's name for what it keeps.
        wanted: the elements of the piece, in the whole param, that the chunks must hold.
        chunks: of one tensor; disjoint.
        what: what errors call the tensor.
        remedy: for errors.

    Raises:
        CheckpointError: after the last chunk, where elements are missing.
    """
    found = 0
    for chunk in chunks:
        both = wanted.intersect(chunk.box)
        if both is not None:
            found += both.numel
            in_piece = both.relative_to(piece.piece.in_global.offsets)
            yield chunk, ReadTarget(piece, kind, both.relative_to(chunk.box.offsets), in_piece)
    if found != wanted.numel:
        got, rule = f"{found} elements of {wanted}", f"hold all {wanted.numel} which this rank owns, each once"
        raise CheckpointError(refusal(what, got, rule, remedy))


def _wanted(piece: OwnedPiece, key: str, record: TensorRecord, saved: _SavedByName) -> Box | None:
    """The elements of a piece that the checkpoint has to hold; None where the piece is padding that it lacks.

    Raises:
        CheckpointError: the param has another shape there.
    """
    ours = piece.placement.global_shape
    is_padding_alone = piece.placement.is_padded and record.shape[1:] == ours[1:] and len(record.shape) == len(ours)
    if record.shape != ours and not is_padding_alone:
        got, rule = f"of shape {list(record.shape)}", f"have the shape {list(ours)} of the run"
        raise CheckpointError(refusal(f"tensor {key!r} in checkpoint {saved.where}", got, rule, saved.another))
    return piece.piece.in_global.intersect(Box.whole(record.shape))
