"""The debug mode: an access to memory that a collective is using is an error where it happens."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.errors import AccessError, refusal
from megatron_distopt.hosts.watch import Watch

__all__ = ["AccessWatch"]

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class AccessWatch:
    """Watches every operator of this thread until `end`.

    Args:
        params: by name.
        is_pending: by name, whether the gather of a param has not been waited for.
        grads: by name, as they lie in the grad buffers.
        is_under_way: by name, whether the bucket of a gradient is being reduced.

    Raises:
        AccessError: out of the operator that reads such a param or writes to such a gradient.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        is_pending: Callable[[str], bool],
        grads: Mapping[str, Tensor],
        is_under_way: Callable[[str], bool],
    ) -> None:
        self._is_pending, self._is_under_way = is_pending, is_under_way
        self._watches = [
            Watch(params, self._param_is_read, writes_only=False),
            Watch(grads, self._grad_is_written, writes_only=True),
        ]
        for watch in self._watches:
            watch.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Nothing is watched any more."""
        while self._watches:
            self._watches.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _param_is_read(self, name: str) -> None:
        if self._is_pending(name):
            got, rule = f"read at {_line()} while it is being gathered", "be waited for first"
            raise AccessError(refusal(f"param {name!r}", got, rule, "Call optimizer.finish_param_gather() before"))

    def _grad_is_written(self, name: str) -> None:
        if self._is_under_way(name):
            got, rule = f"written to at {_line()} while its bucket is being reduced", "be complete when backward ends"
            remedy = "Write overlap_grad_reduce=False, or change it before backward ends"
            raise AccessError(refusal(f"grad of param {name!r}", got, rule, remedy))


def _line() -> str:
    """Where the user's code is."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OURS)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
