"""The host's checkpoint calls that this optimizer does not answer."""

from __future__ import annotations

from typing import NoReturn

from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["refuse_checkpoint"]


def refuse_checkpoint(call: str) -> NoReturn:
    """A collective checkpoint that would lose the state of other ranks is not written at all.

    Raises:
        CheckpointError
    """
    remedy = "Run with --no-save-optim and --no-load-optim, or keep state_dict() of every rank in a file of its own"
    raise CheckpointError(refusal(call, "called", "wait for a format that holds the state of all ranks", remedy))
