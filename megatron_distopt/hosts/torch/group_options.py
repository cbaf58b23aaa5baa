"""The options of the user's param groups, copied into those of the inner optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch.optim import Optimizer

from megatron_distopt.checkpoint.param_groups import check_options
from megatron_distopt.errors import some_of
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.inner_options import (
    FIXED,
    changed_options,
    for_kernels,
    option_text,
    option_values,
)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, FIXED) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


class GroupOptions:
    """The options of the user's param groups and of the inner optimizer's, which follow each
    other."""

    def __init__(
        self, groups: Sequence[MutableMapping[str, Any]], inner: Optimizer, choice: InnerChoice
    ) -> None:
        self._groups, self._inner, self._choice = groups, inner, choice
        #: By group, the user's options and the inner optimizer's, as of the last exchange.
        self._last: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # checksum of all options of the user's groups; None after one was written
        self._crc: int | None = None
        self._in_place: list[Any] = []  # options that may change in place
        self._stamps: list[str] = []  # their texts when the checksum was made
        #: The resets of state so far, which must be equal on all ranks; see `note_reset`.
        self._resets = "as it was"

    def learn(self) -> None:
        """Remembers the options of new groups as they are now."""
        for number in range(len(self._last), len(self._groups)):
            self._last.append(
                (
                    option_values(self._groups[number]),
                    option_values(self._inner.param_groups[number]),
                )
            )
        self._crc = None

    def sync(self) -> None:
        """Copies options that the user has written to the inner optimizer, and those that the inner
        optimizer or a load has written to the user's groups. If both wrote an option, the user's
        value wins.

        Raises:
            ConfigError: if the user wrote a value that the option cannot have. It is not copied.
        """
        for number, (theirs, ours) in enumerate(
            zip(self._groups, self._inner.param_groups, strict=True)
        ):
            of_user, of_inner = self._last[number]
            removed, written = of_user.keys() - theirs.keys(), changed_options(theirs, of_user)
            if written:
                check_options(number, written, self._choice)
                ours.update(for_kernels(written))
            for key in removed:
                ours.pop(key, None)
            changed = changed_options(ours, of_inner)
            shown = {key: value for key, value in changed.items() if key not in written}
            if removed or written or shown:
                theirs.update(shown)
                self._last[number], self._crc = (option_values(theirs), option_values(ours)), None

    def note_reset(self, names: Sequence[str], scale: Mapping[str, float] | None) -> None:
        """Adds a reset of state to what ranks compare in the next step."""
        history = zlib.crc32(repr((self._resets, names, scale)).encode())
        what = "reset" if scale is None else f"scaled by {dict(scale)}"
        self._resets = f"{what} for {some_of(names)} ({history:08x} with all before)"
        self._crc = None

    def checksum(self, salt: object, modulus: int) -> int:
        """A checksum of all options and resets, equal on ranks that have the same.

        A collision does not last: `salt` changes every round. While options do not change it costs
        nothing, and it copies a tensor from its device only after a write to the tensor.
        """
        if self._crc is None:
            values = [value for group in self._groups for value in option_values(group).values()]
            self._in_place = [value for value in values if not _is_fixed(value)]
        stamps = [option_text(value, waits=False) for value in self._in_place]
        if self._crc is None or stamps != self._stamps:
            self._crc, self._stamps = (
                zlib.crc32(repr(sorted(self.described().items())).encode()),
                stamps,
            )
        return zlib.crc32(repr((self._crc, salt)).encode()) % modulus

    def described(self) -> dict[str, str]:
        """All options as texts that ranks can compare."""
        numbered = [
            (number, *each)
            for number, of_group in enumerate(self._groups)
            for each in of_group.items()
        ]
        return {"optimizer state": self._resets} | {
            f"{key} of param group {number}": option_text(value)
            for number, key, value in numbered
            if key != "params"
        }
