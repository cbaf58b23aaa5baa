"""Param groups: as a fork's file has them, and as a `Source` has them.

A gathered file does not say which param was in which group. Megatron's rule does, as long as there are no more than
two groups: one that decays and one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.common import the_step
from megatron_distopt.formats.megatron_2023.model_file import ModelFile, decays

#: Entries that some forks save with the model and others with the optimizer.
_ALSO_SAVED = ("opt_param_scheduler",)
_IDENTITY = ("name", "wd_mult", "lr_mult")
_REMEDY = "Resume it in its own fork with this package installed, and convert what that saves"


@dataclass(frozen=True)
class FileGroup:
    """A param group in a fork's file."""

    options: Mapping[str, Any]  # as it has them, without params and update count
    step: int | None  # updates so far, where the file says it
    members: tuple[int, ...]  # numbers of params of the model file, in its order

    @property
    def as_saved(self) -> dict[str, Any]:
        """The options, and the update count as an inner optimizer's class has it that counts in its groups."""
        return {**self.options} if self.step is None else {**self.options, "step": self.step}


@dataclass(frozen=True)
class ForkEntries:
    """What is taken from a fork's files as it is."""

    groups: tuple[Mapping[str, Any], ...] = ()  # options, with keys that mean nothing to anybody else
    grad_scaler: Mapping[str, Any] | None = None
    also_saved: tuple[tuple[str, Any], ...] = ()  # the scheduler, which forks save with the model or the optimizer


def entries_in(state: Mapping[str, Any]) -> ForkEntries:
    """What is taken from a file with an entry "optimizer"."""
    entry = state.get("optimizer")
    entry = entry if isinstance(entry, Mapping) else {}
    inner = entry.get("optimizer", entry)
    groups = inner.get("param_groups", ()) if isinstance(inner, Mapping) else ()
    options = tuple(_without(group, "params", "step") for group in groups)
    return ForkEntries(
        options, entry.get("grad_scaler"), tuple((key, state[key]) for key in _ALSO_SAVED if key in state)
    )


def _without(group: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def groups_by_rule(file: ModelFile, groups: Sequence[Mapping[str, Any]]) -> tuple[FileGroup, ...]:
    """Which params were in which of the saved groups, by Megatron's rule."""
    by_decay = {group_decays(group): group for group in groups}
    members = {
        decay: tuple(
            number for number, param in enumerate(file.params) if decays(param.name, tuple(param.model.shape)) is decay
        )
        for decay in (True, False)
    }
    needed = {decay for decay, numbers in members.items() if numbers}
    if len(by_decay) != len(groups) or by_decay.keys() != needed:
        got = ", ".join(map(described, sorted(groups, key=group_decays, reverse=True))) or "none"
        rule = f"be {' and '.join('decaying' if each else 'not decaying' for each in sorted(needed, reverse=True))}"
        more = ", one of each, because the file does not say which param is in which"
        raise CheckpointError(refusal(f"param groups in {file.folder}", got, rule + more, _REMEDY))
    return tuple(
        FileGroup(_without(group, "params", "step"), the_step([group], file.folder), members[group_decays(group)])
        for group in groups
    )


def group_decays(group: Mapping[str, Any]) -> bool:
    """Whether weights of the group decay; forks before 2023 have no factor for it."""
    return bool(group.get("wd_mult", group.get("weight_decay", 1.0)))


def described(group: Mapping[str, Any]) -> str:
    """What tells it apart, for errors."""
    return "(" + ", ".join(f"{key}={group[key]}" for key in _IDENTITY if key in group) + ")"


def written_groups(file: ModelFile, records: Sequence[GroupRecord], entries: ForkEntries) -> list[FileGroup]:
    """The groups of a model file in the order in which a fork makes them, without those that it has no param of."""
    found = []
    for record in sorted(records, key=_rank):
        names = set(record.names)
        members = tuple(number for number, param in enumerate(file.params) if param.name in names)
        if members:
            found.append(FileGroup(_options(record, entries), record.step, members))
    return found


def _rank(record: GroupRecord) -> tuple[bool, bool]:
    """A fork makes those that decay first, and of these those without a factor of the learning rate."""
    return not group_decays(record.options), record.options.get("lr_mult", 1.0) != 1.0


def _options(record: GroupRecord, entries: ForkEntries) -> dict[str, Any]:
    """With the keys of the fork's own inner optimizer, where its files say them."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in record.options.items()}
    like = [group for group in entries.groups if identity(group) == identity(options)]
    if like:
        options = {key: options.get(key, value) for key, value in like[0].items()}
    elif "betas" in options:
        options.setdefault("bias_correction", True)  # apex asks for it
    return options


def identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a fork's param groups apart."""
    return tuple(group.get(key) for key in _IDENTITY)
