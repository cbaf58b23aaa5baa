"""The param groups of a run and what a checkpoint has for them: options, counts and the names of moments."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_distopt.checkpoint.param_groups import GroupRecord, check_types
from megatron_distopt.checkpoint.saved_by_name import SavedByName, SavedState
from megatron_distopt.checkpoint.whole_model import Share
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.inner import is_torchs, part_for
from megatron_distopt.optimizer.owners.flat_muon import FlatMuon
from megatron_distopt.optimizer.sharded import ShardedOptimizer

_log = logging.getLogger("megatron_distopt")


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


def match_groups(share: Share, saved: SavedByName) -> Iterator[GroupMatch]:
    """Yields the groups of an optimizer, with what the checkpoint has for them.

    Args:
        share: of the optimizer.
        saved: the checkpoint.

    Raises:
        CheckpointError: params of one group were saved with other options, counts or moments than a group can have.
    """
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


def _match_resting(share: Share, number: int, saved: SavedByName) -> Iterator[GroupMatch]:
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
    saved: SavedByName,
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
