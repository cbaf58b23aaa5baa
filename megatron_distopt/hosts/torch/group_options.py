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
        #: What both have held last, by group.
        self._last: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # of all options of the user's groups; None where one was written
        self._crc: int | None = None
        self._in_place: list[Any] = []  # options that may change in place
        self._stamps: list[str] = []  # of these, when the checksum was made
        #: What was reset so far, which ranks have to do alike; see `note_reset`.
        self._resets = "as it was"

    def learn(self) -> None:
        """Takes the options of further groups for known."""
        for number in range(len(self._last), len(self._groups)):
            self._last.append(
                (
                    option_values(self._groups[number]),
                    option_values(self._inner.param_groups[number]),
                )
            )
        self._crc = None

    def exchange(self) -> None:
        """Takes over what the user has written since the last call, and shows the user what the
        inner optimizer has, which may count there, or a load. Where both have written an option, it
        is the user's.

        Raises:
            ConfigError: what the user has written is no value of the option; it is not taken over.
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
        """The same on all ranks that have the same options; others that have the same have not with
        another salt.

        It costs nothing where options have not changed, and asks no device for the value of a
        tensor that was not written to.
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
