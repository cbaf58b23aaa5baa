"""What a checkpoint says beside tensors: options, steps, the loss scale.

Options are compared param by param, because two checkpoints may put the same params into other groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.param_groups import GroupRecord

__all__ = ["Setting", "settings_of", "settings_that_differ"]


@dataclass(frozen=True)
class Setting:
    """Something that two checkpoints say differently.

    Args:
        what: an option, "step", or a number of the loss scale.
        first, second: what they say; None for nothing.
        names: of the params of which they say it; empty for what is said of the whole.
    """

    what: str
    first: object
    second: object
    names: tuple[str, ...] = ()


def settings_of(group: GroupRecord) -> dict[str, object]:
    """All that is said of the params of a group; a step that is kept with every param is that of the group."""
    scalars = {key: scalar.value for key, scalar in group.scalars.items() if key != "step"}
    return {"step": group.step, **scalars, **group.options}


def settings_that_differ(first: Manifest, second: Manifest, names: Iterable[tuple[str, str]]) -> Iterator[Setting]:
    """
    Args:
        first, second: two checkpoints.
        names: of the params that both have, in each.
    """
    found: dict[tuple[str, str, str], Setting] = {}
    for (ours, theirs), members in _by_groups(first, second, names).items():
        for each in _differing(_settings(first, ours), _settings(second, theirs), members):
            known = found.setdefault((each.what, repr(each.first), repr(each.second)), each)
            if known is not each:
                found[each.what, repr(each.first), repr(each.second)] = Setting(
                    each.what, each.first, each.second, known.names + each.names
                )
    yield from found.values()
    yield from _differing(_of_the_whole(first), _of_the_whole(second), ())


def _by_groups(
    first: Manifest, second: Manifest, names: Iterable[tuple[str, str]]
) -> dict[tuple[int | None, int | None], tuple[str, ...]]:
    """Params by the groups that they are in, in each."""
    ours, theirs = _group_of(first), _group_of(second)
    found: dict[tuple[int | None, int | None], list[str]] = {}
    for a, b in names:
        found.setdefault((ours.get(a), theirs.get(b)), []).append(a)
    return {groups: tuple(members) for groups, members in found.items()}


def _group_of(manifest: Manifest) -> dict[str, int]:
    return {name: number for number, group in enumerate(manifest.groups) for name in group.names}


def _settings(manifest: Manifest, group: int | None) -> dict[str, object]:
    return {} if group is None else settings_of(manifest.groups[group])


def _differing(first: Mapping[str, object], second: Mapping[str, object], names: tuple[str, ...]) -> Iterator[Setting]:
    for what in dict.fromkeys([*first, *second]):
        if first.get(what) != second.get(what):
            yield Setting(what, first.get(what), second.get(what), names)


def _of_the_whole(manifest: Manifest) -> dict[str, object]:
    scale = {f"loss scale: {key}": value for key, value in manifest.loss_scale.items()}
    return {**scale, "skipped steps": manifest.num_skipped}
