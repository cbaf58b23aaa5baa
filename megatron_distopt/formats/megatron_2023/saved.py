"""What plain and per-rank files hold of one param: torch's own state dict, and main params.

::

    inner = {"state": {number: {"exp_avg", "exp_avg_sq", "step" ...}}, "param_groups": [{..., "params": [number]}]}
    mains = [[fp32 main param of a 16-bit param, ...], ...]      by group

Numbers go through the groups. The values of fp32 params come with the model. A plain file has whole params, a rank's
file the shards of one rank, each as a 1-D tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["ExpectedParam", "Origin", "SavedParam", "has_begun", "params_of_group"]


@dataclass(frozen=True)
class Origin:
    """Where a state comes from, for errors.

    Args:
        what: the state and its file, if that is known.
        remedy: what to do where it does not fit.
    """

    what: str
    remedy: str

    def refused(self, got: object, rule: str) -> CheckpointError:
        """The error for a state that does not fit."""
        return CheckpointError(refusal(self.what, got, rule, self.remedy))


@dataclass(frozen=True)
class ExpectedParam:
    """A param, or a rank's shard of one, that a file must hold.

    Args:
        name: of the param.
        shape: of its tensors in the file.
        has_main: whether the file has a main param: one of fp32 is its own.
    """

    name: str
    shape: tuple[int, ...]
    has_main: bool


@dataclass(frozen=True, eq=False)
class SavedParam:
    """What a file holds of a param, or of a shard of one.

    Args:
        name: of the param.
        main: its main param; None for one of fp32.
        state: of the inner optimizer.
    """

    name: str
    main: Tensor | None
    state: Mapping[str, Any]

    @property
    def moments(self) -> dict[str, Tensor]:
        """What is kept for each element, by key."""
        return {key: value for key, value in self.state.items() if torch.is_tensor(value) and value.dim() > 0}

    def check_numbers(self, origin: Origin) -> None:
        """Whether the inner optimizer keeps nothing for the param but moments and an update count.

        Raises:
            CheckpointError: another number would be lost.
        """
        for key, value in self.state.items():
            if torch.is_tensor(value) and value.dim() == 0 and key != "step":
                raise origin.refused(f"one number {key!r} for {self.name!r}", "hold what is kept for each element")


def params_of_group(
    inner: Mapping[str, Any],
    mains: Sequence[Sequence[Tensor]],
    place: int,
    expected: Sequence[ExpectedParam],
    origin: Origin,
) -> Iterator[SavedParam]:
    """What the file holds of each param of one group.

    Args:
        inner: see above.
        mains: see above; may be empty where no param has one.
        place: of the group in the file.
        expected: its params, in the order of the file.
        origin: for errors.

    Raises:
        CheckpointError: the group has other params.
    """
    numbers = list(inner["param_groups"][place].get("params", ()))
    left = list(mains[place]) if place < len(mains) else []
    num_mains = sum(each.has_main for each in expected)
    if len(numbers) != len(expected) or len(left) != num_mains:
        got = f"{len(numbers)} params, {len(left)} of them with a main param, in group {place}"
        raise origin.refused(got, f"hold the model's {len(expected)}, {num_mains} of them of 16 bits")
    of_main = iter(left)
    for each, number in zip(expected, numbers, strict=True):
        saved = SavedParam(each.name, next(of_main) if each.has_main else None, inner["state"].get(number, {}))
        for tensor in (*saved.moments.values(), *([] if saved.main is None else [saved.main])):
            if tuple(tensor.shape) != each.shape:
                raise origin.refused(f"{list(tensor.shape)} for {each.name!r}", f"have its shape {list(each.shape)}")
        yield saved


def has_begun(inner: Mapping[str, Any]) -> bool:
    """Whether torch's own state dict is of an optimizer that had updated anything."""
    return any(inner["state"].values())
