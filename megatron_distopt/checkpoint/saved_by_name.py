"""What a checkpoint holds, looked up by the names of the run.

[Note: another kind of optimizer] A param that Muon updates and another optimizer has updated, or the other way round,
keeps its main param and nothing else: SGD and Muon have a momentum of the same name that is not the same, and each
needs an lr of its own. Its moments and its count begin anew, its options stay those of the run, and the load says so.
The same holds for optimizers that update whole params, each of which keeps what no other one understands and nobody
else can cut: the state of a param that tensor-parallel ranks share is for as many ranks, and for the shape that it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, key_of, kind_of, name_of, some_of
from megatron_distopt.checkpoint.owned_state import is_owned, is_owned_part
from megatron_distopt.checkpoint.param_groups import GroupRecord, Scalar
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.sharded import ShardedOptimizer


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


def _another(model: WholeModel) -> str:
    """The remedy where the checkpoint is of another model."""
    return f"Load a checkpoint of this model, or {model.from_weights}"


class SavedByName:
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
