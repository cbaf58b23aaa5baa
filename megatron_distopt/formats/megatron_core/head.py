"""megatron-core's param groups and loss scale, as its checkpoints have them: without the names of the params."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, kind_of, name_of
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import TensorInfo
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_2023.model_file import decays
from megatron_distopt.formats.megatron_2023.param_groups import FileGroup, record_of
from megatron_distopt.formats.pickles import as_number

__all__ = ["head_of"]

_ADAM = frozenset(("exp_avg", "exp_avg_sq"))
_SCALE = {"scale": "scale", "growth_tracker": "good_steps", "hysteresis_tracker": "tolerated"}
#: Options other than weight decay that tell groups apart.
_IDENTITY = ("lr_mult", "is_expert_parallel", "is_decoupled_lr")


def head_of(
    infos: Mapping[str, TensorInfo],
    groups: Sequence[Mapping[str, Any]],
    scaler: Mapping[str, Any] | None,
    about: Mapping[str, str | int],
    where: str,
) -> Manifest:
    """The manifest without tensors.

    Args:
        infos: of the tensors.
        groups: param groups as saved, of all optimizers.
        scaler: state of the grad scaler, where there was one.
        about: of the writer.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: groups were updated a different number of times.
    """
    inner = "adam" if {kind_of(key) for key in infos} >= _ADAM else "unknown"
    shapes = {name_of(key): info.shape for key, info in infos.items() if kind_of(key) == MAIN}
    records = tuple(_records(shapes, groups, where))
    return Manifest("", (), {}, records, inner, _loss_scale(scaler), about=about)


def _loss_scale(scaler: Mapping[str, Any] | None) -> dict[str, float]:
    """The loss scale for a `Source`; empty for a constant one."""
    if not scaler or not _SCALE.keys() <= scaler.keys():
        return {}
    return {name: float(as_number(scaler[key])) for key, name in _SCALE.items()}


def _records(
    shapes: Mapping[str, tuple[int, ...]], groups: Sequence[Mapping[str, Any]], where: str
) -> Iterator[GroupRecord]:
    """By megatron-core's rule where there is a group that decays and one that does not; otherwise what all groups
    share is said of all params, and the rest is left to the run that loads."""
    step = _step(groups, where)
    by_decay = {bool(group.get("wd_mult", 1.0)): group for group in groups}
    if len(groups) == len(by_decay) == 2 and len({_identity(group) for group in groups}) == 1:
        for decay, group in by_decay.items():
            names = [name for name, shape in shapes.items() if decays(name, shape) is decay]
            if names:
                yield _record(names, group, step)
    else:
        shared = {key: value for key, value in groups[0].items() if all(_same(each, key, value) for each in groups)}
        yield _record(shapes, shared, step)


def _record(names: Iterable[str], options: Mapping[str, Any], step: int | None) -> GroupRecord:
    return record_of(FileGroup(options, step, ()), tuple(names), step)


def _same(group: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in group and bool(as_number(group[key]) == as_number(value))


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in _IDENTITY)


def _step(groups: Sequence[Mapping[str, Any]], where: str) -> int | None:
    """The update count. A group that had no param on the rank that wrote may lack it."""
    steps = {int(as_number(group["step"])) for group in groups if group.get("step") is not None}
    if len(steps) > 1:
        got, rule = f"{sorted(steps)} updates", "be as many for all param groups"
        remedy = "Convert a run whose params were all trained from its start"
        raise CheckpointError(refusal(f"param groups in {where}", got, rule, remedy))
    return next(iter(steps), None)
