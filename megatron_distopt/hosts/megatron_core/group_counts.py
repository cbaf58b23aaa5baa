"""Shows the count of updates in the param groups of the inner optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer


class _Shown(NamedTuple):
    """The last count in a group."""

    num_updates: int
    version: int  # version of the count tensor in the state at that time


class GroupCounts:
    """Keeps the count of updates in `group["step"]` as well, where apex's and TransformerEngine's
    Adam have it and users of the host expect it.

    The inner optimizer uses the counts in the state of each main param, as torch's Adam does. A
    count that users write into the group is copied there.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._shown: dict[int, _Shown] = {}  # by group

    def follow(self) -> None:
        """Takes over counts that users have written into the group or the state. If both were
        written, the group wins."""
        for number, group in enumerate(self._inner.param_groups):
            counts = self._counts(group)
            shown = self._shown.get(number)
            written = group.get("step")
            is_new = shown is None or written != shown.num_updates
            if written is not None and is_new:
                for count in counts:
                    count.fill_(int(written))
                self._show(number, group, counts, int(written))
            elif shown is None:
                continue
            elif counts and counts[0]._version != shown.version:
                self._show(number, group, counts, int(counts[0]))
            elif group["params"] and not counts:  # the state was reset
                del group["step"], self._shown[number]

    def show(self, *, is_after_update: bool = False) -> None:
        """Writes the counts into the groups. They are read from the state, or after an update
        counted up by one."""
        for number, group in enumerate(self._inner.param_groups):
            counts = self._counts(group)
            shown = self._shown.get(number)
            if counts and shown is not None and is_after_update:
                # reading the count from the device would wait for it
                self._show(number, group, counts, shown.num_updates + 1)
            elif counts:
                self._show(number, group, counts, int(counts[0]))

    def _show(
        self, number: int, group: dict[str, Any], counts: list[Tensor], num_updates: int
    ) -> None:
        group["step"] = num_updates
        version = counts[0]._version if counts else 0
        self._shown[number] = _Shown(num_updates, version)

    def _counts(self, group: Mapping[str, Any]) -> list[Tensor]:
        """The counts in the state of a group's main params; empty if this rank has none."""
        counts = []
        for main in group["params"]:
            state = self._inner.state.get(main, {})
            if "step" in state:
                counts.append(state["step"])
        return counts
