"""What the checkpoint of another software says besides tensors: inner optimizer, update count, loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.pickles import as_number

_ADAM, _MOMENTS_OF_ADAM = "adam", frozenset(("exp_avg", "exp_avg_sq"))
#: From the keys of a Megatron's grad scaler to those of a manifest.
_SCALE = {"scale": "scale", "growth_tracker": "good_steps", "hysteresis_tracker": "tolerated"}


def inner_name(kinds: Iterable[str]) -> str:
    """What a `Source` calls the inner optimizer that keeps tensors of these kinds."""
    return _ADAM if set(kinds) >= _MOMENTS_OF_ADAM else "unknown"


def loss_scale_of(scaler: Mapping[str, Any] | None) -> dict[str, float]:
    """The loss scale in the state of a Megatron's grad scaler; empty for a constant one."""
    if not scaler or not _SCALE.keys() <= scaler.keys():
        return {}
    return {name: float(as_number(scaler[key])) for key, name in _SCALE.items()}


def the_step(holders: Iterable[Mapping[str, Any]], where: object) -> int | None:
    """The update count, wherever the inner optimizer's class keeps it; None where it was lost.

    Some classes leave it out in groups that had no param on the rank that wrote them.

    Raises:
        CheckpointError: there are several.
    """
    steps = {int(as_number(holder["step"])) for holder in holders if holder.get("step") is not None}
    if len(steps) > 1:
        got, rule = ", ".join(map(str, sorted(steps))), "be the same for all params"
        remedy = "Convert a run whose params were all trained from its start"
        raise CheckpointError(refusal(f"update count in {where}", got, rule, remedy))
    return next(iter(steps), None)


def with_step(source: Source, resume_step: int | None, where: object) -> Source:
    """The same with an update count that the checkpoint lost.

    Raises:
        CheckpointError: the checkpoint knows another one.
    """
    known = {group.step for group in source.head.groups} - {None}
    if resume_step is None or known == {resume_step}:
        return source
    if known:
        got, remedy = ", ".join(map(str, sorted(known, key=str))), "Drop --resume-step: the checkpoint knows it"
        rule = f"be the {resume_step} of --resume-step"
        raise CheckpointError(refusal(f"update count in {where}", got, rule, remedy))
    groups = tuple(replace(group, step=resume_step) for group in source.head.groups)
    return replace(source, head=replace(source.head, groups=groups))


def check_step(source: Source, where: object) -> None:
    """Whether a run can go on from it; to look at, a file that lost its update count is as good as any.

    Raises:
        CheckpointError: the state is Adam's, and its update count is unknown.
    """
    if source.head.inner == _ADAM and any(group.step is None for group in source.head.groups):
        got = "none: torch's Adam keeps it where this file layout does not save it"
        remedy = "Convert it with --resume-step N, the number of updates so far (iterations without skipped ones)"
        raise CheckpointError(refusal(f"update count in {where}", got, "be there for Adam", remedy))
