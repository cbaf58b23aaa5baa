"""What this rank has to read, decided and checked before anything is changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_distopt.checkpoint.manifest import MAIN, Chunk, Manifest, TensorRecord, key_of, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord, Scalar, check_types
from megatron_distopt.checkpoint.whole_model import OwnedPiece, Share, WholeModel, owned_pieces
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Box, Placement
from megatron_distopt.optimizer import ShardedOptimizer, is_torchs

__all__ = [
    "GroupMatch",
    "LoadPlan",
    "Read",
    "SavedState",
    "Target",
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
class Target:
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
    """One tensor to read from a file, and all that it is needed for."""

    key: str
    chunk: Chunk
    dtype: torch.dtype
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class SavedState:
    """What the checkpoint says of the state of one param; params of one flat param have it in common.

    Args:
        step: updates so far; None where they are not counted, or there was none.
        scalars: see `GroupRecord.scalars`.
        kinds: what is held of each element beside the main param, with dtypes; empty for a param without state.
    """

    step: int | None
    scalars: tuple[tuple[str, Scalar], ...]
    kinds: tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True, eq=False)
class GroupMatch:
    """A param group of the run, and what is saved of its params.

    Args:
        optimizer: that has the group.
        number: of the group in it.
        options: saved ones, the same for all its params.
        states: by the params' names in the optimizer.
    """

    optimizer: ShardedOptimizer
    number: int
    options: Mapping[str, Any]
    states: Mapping[str, SavedState]

    @property
    def step(self) -> int | None:
        """Updates of the params that were updated most often."""
        return max((state.step for state in self.states.values() if state.step is not None), default=None)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """All that this rank reads.

    Args:
        manifest: of the checkpoint.
        reads: in the order of files and of the bytes in them.
        groups: those that the checkpoint knows.
    """

    manifest: Manifest
    reads: tuple[Read, ...]
    groups: tuple[GroupMatch, ...]


def plan_load(manifest: Manifest, where: str, model: WholeModel) -> LoadPlan:
    """Finds everything that this rank owns in the checkpoint.

    Args:
        manifest: of the checkpoint.
        where: its path, for errors.
        model: that will take the state.

    Raises:
        CheckpointError: a param is missing, has another shape, or its group is ambiguous.
    """
    saved = _Saved(manifest, where, model)
    groups = tuple(match for share in model.shares for match in _match_groups(share, saved))
    targets: dict[tuple[str, Chunk], list[Target]] = {}
    for piece in owned_pieces(model):
        for key, chunk, target in _targets_of(piece, saved):
            targets.setdefault((key, chunk), []).append(target)
    reads = [
        Read(key, chunk, getattr(torch, manifest.tensors[key].dtype), tuple(found))
        for (key, chunk), found in targets.items()
    ]
    return LoadPlan(manifest, tuple(sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start))), groups)


def check_names(manifest: Manifest, where: str, model: WholeModel, wanted: Iterable[str]) -> None:
    """Whether the checkpoint is of this model: params that it alone has are somebody else's.

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
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        got = f"{', '.join(map(repr, foreign[:3]))}{more}, which the model does not have"
        raise CheckpointError(refusal(f"checkpoint {where}", got, "hold the params of the run", _another(model)))


def _canonical(names: Iterable[str], model: WholeModel) -> dict[str, str]:
    """By name what it is compared by; a name itself where another one has the same canonical name."""
    canonical = {name: model.canonical(name) for name in names}
    counts = Counter(canonical.values())
    return {name: each if counts[each] == 1 else name for name, each in canonical.items()}


class _Saved:
    """The checkpoint by the names that all hosts share.

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
        for key, record in manifest.tensors.items():
            self._kinds.get(name_of(key), {})[kind_of(key)] = getattr(torch, record.dtype)
        self._group_of = {name: group for group in manifest.groups for name in group.names}
        resting = {name: group for group in manifest.resting for name in group.names}
        by_canonical = {canonical: name for name, canonical in _canonical([*manifest.names, *resting], model).items()}
        known = {**resting, **self._group_of}
        self._settings = {each: known[name] for each, name in by_canonical.items() if name in known}

    def name_of(self, placement: Placement) -> str:
        """As the checkpoint spells it."""
        name = self._name_of.get(self._canonical[placement.name])
        if name is None:
            got = f"without param {placement.name!r}"
            raise CheckpointError(refusal(f"checkpoint {self.where}", got, "hold the params of the run", self.another))
        return name

    def group_of(self, placement: Placement) -> GroupRecord:
        """In which the param was."""
        name = self.name_of(placement)
        if name not in self._group_of:
            got = f"param {name!r} in no group"
            raise CheckpointError(
                refusal(f"checkpoint {self.where}", got, "name the group of every param", self.another)
            )
        return self._group_of[name]

    def resting_of(self, name: str) -> GroupRecord | None:
        """In which a param without state here was; None where the checkpoint does not know it."""
        return self._settings.get(self._canonical[name])

    def state_of(self, placement: Placement) -> SavedState:
        """What it says of the param beside values and options."""
        group, kinds = self.group_of(placement), self.kinds_of(placement)
        return SavedState(group.step, tuple(sorted(group.scalars.items())), tuple(sorted(kinds.items())))

    def kinds_of(self, placement: Placement) -> dict[str, torch.dtype]:
        """What it holds of the param beside its values, with dtypes."""
        kinds = self._kinds[self.name_of(placement)]
        return {kind: dtype for kind, dtype in kinds.items() if kind != MAIN}


def _match_groups(share: Share, saved: _Saved) -> Iterator[GroupMatch]:
    for number, group in enumerate(share.optimizer.plan.groups):
        if not group.names:
            yield from _match_resting(share, number, saved)
            continue
        placements = {name: share.placements[name] for name in group.names}
        options = {placement.name: saved.group_of(placement) for placement in placements.values()}
        _check_one_group(share.optimizer, number, options, saved.where)
        states = {name: saved.state_of(placement) for name, placement in placements.items()}
        _check_kinds(share.optimizer, placements, states, saved)
        steps = {placement.name: states[name].step for name, placement in placements.items()}
        check_steps(share.optimizer, steps, f"updates in checkpoint {saved.where}")
        yield GroupMatch(share.optimizer, number, next(iter(options.values())).options, states)


def _match_resting(share: Share, number: int, saved: _Saved) -> Iterator[GroupMatch]:
    """A group of frozen params has no state, but options, which count once one of them is unfrozen."""
    found = {name: saved.resting_of(name) for name in share.resting.get(number, ())}
    options = {name: group for name, group in found.items() if group is not None}
    if options:
        _check_one_group(share.optimizer, number, options, saved.where)
        yield GroupMatch(share.optimizer, number, next(iter(options.values())).options, {})


def _check_one_group(optimizer: ShardedOptimizer, number: int, groups: Mapping[str, GroupRecord], where: str) -> None:
    """Whether the options of params that are in one group here can be its options."""
    first = next(iter(groups))
    for name, group in groups.items():
        if group.options != groups[first].options:
            rule = "have been in groups of equal options, because they are in one here"
            got = f"{first!r} and {name!r} in different groups"
            remedy = "Build the optimizer with the param groups of the saved run"
            raise CheckpointError(refusal(f"param groups in checkpoint {where}", got, rule, remedy))
    _check_options(optimizer, number, groups[first], where)


def needed_moments(optimizer: ShardedOptimizer) -> frozenset[str]:
    """What the inner optimizer keeps of each element of a param that it has updated, as far as that is known.

    An instance that a user gave goes by the name of its class.
    """
    if isinstance(optimizer.inner, (torch.optim.Adam, torch.optim.AdamW)):
        return frozenset(("exp_avg", "exp_avg_sq"))
    if isinstance(optimizer.inner, torch.optim.SGD):
        return frozenset(("momentum_buffer",))
    return optimizer.plan.choice.moments


def _check_options(optimizer: ShardedOptimizer, number: int, saved: GroupRecord, where: str) -> None:
    """Whether every saved option is of the type that the optimizer computes with, and those without a value are here.

    What no file keeps, such as a function, has the run's own value.
    """
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
    placements: Mapping[str, Placement],
    states: Mapping[str, SavedState],
    saved: _Saved,
) -> None:
    """The same of every param of a group, and what the inner optimizer needs; or nothing of one without an update."""
    wanted = needed_moments(optimizer)
    usual = next((state.kinds for state in states.values() if state.kinds), ())
    for name, state in states.items():
        found = {kind for kind, _ in state.kinds}
        has_begun = bool(found) or bool(state.step)
        if (found and state.kinds != usual) or (has_begun and not wanted <= found):
            what = f"state of {placements[name].name!r} in checkpoint {saved.where}"
            got = f"{', '.join(sorted(found)) or 'nothing'} beside the param"
            rule = f"hold {', '.join(sorted(wanted | dict(usual).keys()))} for {optimizer.plan.choice.name}"
            remedy = f"Resume with the optimizer of the saved run, or {saved.from_weights}"
            raise CheckpointError(refusal(what, got, rule, remedy))


def check_steps(optimizer: ShardedOptimizer, steps: Mapping[str, int | None], what: str) -> None:
    """Whether the inner optimizer can count the updates of each param by itself, where they differ.

    Args:
        optimizer: that will take the state.
        steps: updates so far, by name, of the params of one group.
        what: the counts are called in errors.

    Raises:
        CheckpointError
    """
    counted = {step: name for name, step in steps.items() if step is not None}
    if len(counted) > 1 and not is_torchs(optimizer.inner):
        (one, first), (other, second) = sorted(counted.items())[:2]
        got = f"{one} of {first!r} and {other} of {second!r}"
        rule = f"be as many for all params of a group, for which {optimizer.plan.choice.name} has one count"
        raise CheckpointError(refusal(what, got, rule, "Write adam='torch_fused' or adam='torch_foreach'"))


def _targets_of(piece: OwnedPiece, saved: _Saved) -> Iterator[tuple[str, Chunk, Target]]:
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
) -> Iterator[tuple[Chunk, Target]]:
    """The chunks that hold elements of a piece, each with the part that is needed.

    Args:
        piece: of the state.
        kind: "main", or the inner optimizer's name for what it keeps.
        wanted: the elements of the whole param that the chunks must hold.
        chunks: of one tensor; disjoint.
        what: the tensor is called in errors.
        remedy: where elements are missing.

    Raises:
        CheckpointError: after the last chunk, where elements are missing.
    """
    found = 0
    for chunk in chunks:
        both = wanted.intersect(chunk.box)
        if both is not None:
            found += both.numel
            in_piece = both.relative_to(piece.piece.in_global.offsets)
            yield chunk, Target(piece, kind, both.relative_to(chunk.box.offsets), in_piece)
    if found != wanted.numel:
        got, rule = f"{found} elements of {wanted}", f"hold all {wanted.numel} which this rank owns, each once"
        raise CheckpointError(refusal(what, got, rule, remedy))


def _wanted(piece: OwnedPiece, key: str, record: TensorRecord, saved: _Saved) -> Box | None:
    """What of a piece the checkpoint has to hold; None where the piece is padding that it lacks.

    Raises:
        CheckpointError: the param has another shape there.
    """
    ours = piece.placement.global_shape
    is_padding_alone = piece.placement.is_padded and record.shape[1:] == ours[1:] and len(record.shape) == len(ours)
    if record.shape != ours and not is_padding_alone:
        got, rule = f"of shape {list(record.shape)}", f"have the shape {list(ours)} of the run"
        raise CheckpointError(refusal(f"tensor {key!r} in checkpoint {saved.where}", got, rule, saved.another))
    return piece.piece.in_global.intersect(Box.whole(record.shape))
