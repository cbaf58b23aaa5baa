"""Process groups, as the rest of the package sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_distopt.errors import ConfigError, InvariantError, RanksDisagreeError, refusal

__all__ = ["Group", "ProcessGroup", "is_initialized", "named_losses"]


def is_initialized() -> bool:
    """Whether torch.distributed can communicate."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Group:
    """A process group with this process's place in it.

    Args:
        handle: torch's group; None for all ranks.
        rank: of this process in the group.
        size: number of ranks in the group.
    """

    handle: ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, handle: ProcessGroup | None = None) -> Group:
        """Reads rank and size off torch's group.

        Raises:
            ConfigError: torch.distributed is not initialised.
        """
        if not is_initialized():
            remedy = "Call torch.distributed.init_process_group first, or start with torchrun or deepspeed"
            raise ConfigError(refusal("process group", "torch.distributed is not initialised", "exist", remedy))
        return cls(handle, dist.get_rank(handle), dist.get_world_size(handle))

    def global_rank(self, rank: int) -> int:
        """What the launcher calls a rank of this group; every message that names a rank means that one."""
        return rank if self.handle is None else dist.get_global_rank(self.handle, rank)

    @property
    def own_handle(self) -> ProcessGroup:
        """torch's group, also where `handle` stands for all ranks.

        Raises:
            InvariantError: torch.distributed is over.
        """
        handle = self.handle or dist.group.WORLD
        if handle is None:
            raise InvariantError(refusal("process group", "none", "be there until the last collective", "Report this"))
        return handle

    @property
    def backend(self) -> str:
        """ "gloo", "nccl" or what else carries the group."""
        return str(dist.get_backend(self.handle))


@contextmanager
def named_losses() -> Iterator[None]:
    """Meanwhile a backend's own error, about a rank that ended or did not come, is one of ours."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rule, remedy = "be called by every rank of its group", "Look for the rank whose error is the first one"
        raise RanksDisagreeError(refusal("collective", f"lost ({reason})", rule, remedy)) from error
