"""The host's checkpoint calls that this optimizer does not answer."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["RefusedCheckpoints"]


class RefusedCheckpoints:
    """A collective checkpoint that would lose the state of other ranks is not written at all: each call raises
    CheckpointError."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("sharded_state_dict")

    def save_parameter_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("save_parameter_state")

    def load_parameter_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("load_parameter_state")

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("get_parameter_state_dp_zero")

    def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("load_parameter_state_from_dp_zero")


def _refuse(call: str) -> NoReturn:
    remedy = "Run with --no-save-optim and --no-load-optim, or keep state_dict() of every rank in a file of its own"
    raise CheckpointError(refusal(call, "called", "wait for a format that holds the state of all ranks", remedy))
