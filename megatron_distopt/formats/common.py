"""What the formats of other software have in common: update counts, loss scales, and how main
params are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.whole_model import LOSS_SCALE_NAMES
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.pickles import as_number
from megatron_distopt.layout import Box, Piece, Placement, Span

_ADAM = "adam"
#: What an inner optimizer keeps for each element.
_MOMENTS = {_ADAM: {"exp_avg", "exp_avg_sq"}, "torch_sgd": {"momentum_buffer"}}


def inner_name(kinds: Iterable[str]) -> str:
    """What a `Source` calls the inner optimizer that keeps tensors of these kinds."""
    found = set(kinds)
    for name, moments in _MOMENTS.items():
        if found >= moments:
            return name
    return "unknown"


def loss_scale_of(scaler: Mapping[str, Any] | None) -> dict[str, float]:
    """The loss scale in the state of a Megatron's grad scaler; empty for a constant one."""
    if not scaler or not LOSS_SCALE_NAMES.keys() <= scaler.keys():
        return {}
    scale = {}
    for key, name in LOSS_SCALE_NAMES.items():
        number = as_number(scaler[key])
        scale[name] = float(number)
    return scale


def the_step(holders: Iterable[Mapping[str, Any]], where: object) -> int | None:
    """The update count, wherever the inner optimizer's class keeps it; None where it was lost.

    Some classes leave it out in groups that had no param on the rank that wrote them.
    """
    counts = [holder.get("step") for holder in holders]
    steps = {int(as_number(count)) for count in counts if count is not None}
    if len(steps) > 1:
        found = ", ".join(map(str, sorted(steps)))
        raise CheckpointError(
            f"The update counts in {where} are {found}, and must be the same for all params. "
            "Convert a run whose params were all trained from its start."
        )
    return next(iter(steps), None)


def known_step(known: Iterable[int | None], given: int | None, where: object) -> int | None:
    """The update count that is known, or the `given` one where a checkpoint lost it."""
    steps = set(known) - {None}
    if given is not None and steps - {given}:
        found = ", ".join(sorted(map(str, steps)))
        raise CheckpointError(
            f"The update count in {where} is {found}, but the given one is {given}. Drop "
            "--resume-step or --distopt-resume-step, because the checkpoint has the count."
        )
    return next(iter(steps), given)


def no_step(where: object) -> CheckpointError:
    """The error where Adam cannot go on without a count."""
    return CheckpointError(
        f"There is no update count in {where}. This file layout does not save the count of "
        "torch's Adam, which needs it to continue. Write --distopt-resume-step N for the run "
        "that loads it, or --resume-step N for megatron-distopt convert, where N is the number "
        "of updates so far (iterations without skipped ones)."
    )


def with_step(head: Manifest, resume_step: int | None, where: object) -> Manifest:
    """The same with an update count that the checkpoint lost."""
    steps = [group.step for group in head.groups]
    step = known_step(steps, resume_step, where)
    is_known = any(each is not None for each in steps)
    if resume_step is None or is_known:
        return head
    groups = tuple(replace(group, step=step) for group in head.groups)
    return replace(head, groups=groups)


def check_step(head: Manifest, where: object) -> None:
    """Checks that a run can continue from it. A file that lost its update count can be inspected,
    but not trained from."""
    is_lost = any(group.step is None for group in head.groups)
    if head.inner == _ADAM and is_lost:
        raise no_step(where)


def fill(found: Tensor, box: Box, values: Tensor, start: int, pieces: Iterable[Piece]) -> None:
    """Copies those elements of a stretch of a flattened param, `values` from its element `start`
    on, that lie in a box of the whole tensor. `found` has the shape of the box; `pieces` say where
    the stretch lies in the whole tensor."""
    for piece in pieces:
        both = piece.in_global.intersect(box)
        if both is not None:
            in_values = piece.in_param.relative_to(start)
            stretch = values[in_values.as_slice()].view(piece.sizes)
            in_piece = stretch[piece.inside.as_slices()]
            of_piece = both.relative_to(piece.in_global.offsets)
            of_box = both.relative_to(box.offsets)
            found[of_box.as_slices()] = in_piece[of_piece.as_slices()]


def cut(placement: Placement, dtype: torch.dtype, read: Callable[[Box], Tensor]) -> Tensor:
    """Cuts a rank's param out of the whole tensor, of which `read` returns boxes: the inverse of
    `fill`."""
    local = torch.empty(placement.shape, dtype=dtype)
    flat = local.view(-1)
    for piece in placement.pieces(Span(0, local.numel())):
        stretch = flat[piece.in_param.as_slice()].view(piece.sizes)
        inside = piece.inside.as_slices()
        stretch[inside] = read(piece.in_global)
    return local


def check_rounds(main: Tensor, model: Tensor, name: str, where: object, remedy: str) -> None:
    """Refuses a main param whose values, rounded to the model's dtype, are not the model param's:
    such a state belongs to another model, or was read from a wrong place."""
    numbers = torch.finfo(model.dtype)
    rounded = main.view(model.shape).to(model.dtype)
    is_alike = torch.isclose(rounded, model, rtol=numbers.eps, atol=numbers.tiny, equal_nan=True)
    num_others = int((~is_alike).sum())
    if num_others:
        raise CheckpointError(
            f"{num_others} of {main.numel()} main values of {name!r} in {where} do not round to "
            f"the model's params. {remedy}"
        )
