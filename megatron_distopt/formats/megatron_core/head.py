"""megatron-core's param groups and loss scale, as its checkpoints have them: without the names of the params."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.formats.head import inner_name, loss_scale_of, the_step
from megatron_distopt.formats.megatron_2023.model_file import decays
from megatron_distopt.formats.pickles import as_number

#: Options other than weight decay that tell groups apart.
_IDENTITY = ("lr_mult", "is_expert_parallel", "is_decoupled_lr")


def head_of(
    infos: Mapping[str, TensorInfo], states: Sequence[Mapping[str, Any]], format: str, iteration: Any, where: str
) -> Manifest:
    """The manifest without tensors.

    Args:
        infos: of the tensors.
        states: of all optimizers, with their param groups and grad scalers, as saved.
        format: of the files.
        iteration: of the run, where they say it.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: groups were updated a different number of times.
    """
    about: dict[str, str | int] = {"host": "megatron-core", "format": format}
    if isinstance(iteration, int):
        about["iteration"] = iteration
    scaler = next((state["grad_scaler"] for state in states if state.get("grad_scaler")), None)
    inner = inner_name(map(kind_of, infos))
    shapes = {name_of(key): info.shape for key, info in infos.items() if kind_of(key) == MAIN}
    records = tuple(_records(shapes, _groups_in(states), where))
    return Manifest("", (), {}, records, inner, loss_scale_of(scaler), about=about)


def _groups_in(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Param groups, each once, with the step, which optimizers that are not distributed keep outside of the groups."""
    found: list[Mapping[str, Any]] = []
    for state in states:
        inner = state.get("optimizer", state)
        kept = inner.get("state") or {}
        step = {"step": kept["common_step"]} if "common_step" in kept else {}
        for group in inner["param_groups"]:
            options = {**step, **{key: value for key, value in group.items() if key != "params"}}
            if options not in found:
                found.append(options)
    return found


def _records(
    shapes: Mapping[str, tuple[int, ...]], groups: Sequence[Mapping[str, Any]], where: str
) -> Iterator[GroupRecord]:
    """By megatron-core's rule where there is a group that decays and one that does not; otherwise what all groups
    share is said of all params, and the rest is left to the run that loads."""
    step = the_step(groups, where)
    by_decay = {bool(group.get("wd_mult", 1.0)): group for group in groups}
    if len(groups) == len(by_decay) == 2 and len({_identity(group) for group in groups}) == 1:
        for decay, group in by_decay.items():
            names = [name for name, shape in shapes.items() if decays(name, shape) is decay]
            if names:
                yield GroupRecord(tuple(names), options_of(group)[0], step)
    else:
        shared = {key: value for key, value in groups[0].items() if all(_same(each, key, value) for each in groups)}
        yield GroupRecord(tuple(shapes), options_of(shared)[0], step)


def _same(group: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in group and bool(as_number(group[key]) == as_number(value))


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in _IDENTITY)
