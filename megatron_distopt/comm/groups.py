"""Process groups as the rest of the package sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Event

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from megatron_distopt.errors import ConfigError, InvariantError, RanksDisagreeError

_PROBED_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_were_used = Event()
#: torch's backend of ranks that do not exist: its collectives send nothing, and it has no store.
FAKE = "fake"


def is_initialized() -> bool:
    """Whether torch.distributed can communicate."""
    return dist.is_available() and dist.is_initialized()


def were_used() -> bool:
    """Whether a group was ever used, even if torch.distributed has ended since: something may still
    hold one."""
    return _were_used.is_set()


def available_backends() -> tuple[str, ...]:
    """Names for `init_process_group`: torch's own that were compiled in, and those that other
    packages registered."""
    if not dist.is_available():
        return ()
    compiled = [name for name in _PROBED_BACKENDS if getattr(dist, f"is_{name}_available", bool)()]
    registered = [
        name
        for name in dist.Backend.backend_list
        if name not in ("undefined", FAKE, *_PROBED_BACKENDS)
    ]
    return (*compiled, *registered)


def default_backend(device_type: str) -> str | None:
    """The backend that torch uses by default for tensors of a device; None where it names none."""
    if not dist.is_available():
        return None
    by_device: dict[str, str] = getattr(dist.Backend, "default_device_backend_map", {})
    return by_device.get(device_type)


@dataclass(frozen=True)
class Group:
    """A process group with this process's place in it."""

    handle: ProcessGroup | None  # torch's group; None for all ranks
    rank: int  # of this process in the group
    size: int  # number of ranks in the group

    @classmethod
    def of(cls, handle: ProcessGroup | None = None) -> Group:
        """Reads rank and size off torch's group.

        Raises:
            ConfigError: torch.distributed is not initialised, a framework has destroyed the group
                for a time, or this process is not in it.
        """
        if not is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised. Call "
                "torch.distributed.init_process_group first, or start with torchrun or deepspeed."
            )
        # torch would take None for all ranks
        if handle is not None and getattr(handle, "group", handle) is None:
            raise ConfigError(
                f"The process group is a {type(handle).__name__} whose torch group has been "
                "destroyed. Create the process groups again before this call."
            )
        rank = dist.get_rank(handle)
        if rank < 0:
            raise ConfigError(
                f"Rank {dist.get_rank()} is not a member of the process group that it was given. "
                "Give each rank a group that it belongs to, or make this call only on the ranks "
                "of the group."
            )
        _were_used.set()
        return cls(handle, rank, dist.get_world_size(handle))

    def global_rank(self, rank: int) -> int:
        """The launcher's number for a rank of this group; every message that names a rank uses that
        number."""
        return rank if self.handle is None else dist.get_global_rank(self.handle, rank)

    @property
    def own_handle(self) -> ProcessGroup:
        """torch's group, also where `handle` stands for all ranks.

        Raises:
            InvariantError: torch.distributed has ended.
        """
        handle = self.handle or dist.group.WORLD
        if handle is None:
            raise InvariantError(
                "torch.distributed ended before the last collective. Report this as a bug."
            )
        return handle

    @property
    def time_limit(self) -> float:
        """Seconds that a collective waits for other ranks: the timeout that was given to
        `init_process_group` or `new_group`."""
        devices = sorted(self.own_handle._device_types, key=lambda device: device.type != "cpu")
        # A framework's own group has no backend.
        backend = self.own_handle._get_backend(devices[0]) if devices else None
        limit = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
        return float(limit.total_seconds())

    @cached_property
    def backends(self) -> tuple[str, dict[str, str]]:
        """The configuration of the backend, and its parts by device type."""
        try:
            config = dist.get_backend_config(self.handle)
        except (TypeError, ValueError):
            config = self.backend  # of a group that is not torch's own
        return config, dict(part.split(":", 1) for part in config.split(",") if ":" in part)

    @property
    def backend(self) -> str:
        """The name of the backend, such as "gloo" or "nccl".

        Raises:
            ConfigError: torch does not know the group. Frameworks that make groups anew, as slime,
                wrap each in an object of their own, and replace some of torch's functions by ones
                that know it.
        """
        try:
            return str(dist.get_backend(self.handle))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "torch.distributed does not know the process group, a "
                f"{type(self.handle).__name__}. Apply the framework's patch of torch.distributed "
                "before this call."
            ) from error


def backend_of(device: torch.device, group: Group) -> str:
    """The backend that moves tensors of a device in a group."""
    config, by_device = group.backends
    return by_device.get(device.type, config)


@contextmanager
def named_losses(rank: int | None = None) -> Iterator[None]:
    """Turns a backend's error about a rank that ended or did not come into a `RanksDisagreeError`.

    Args:
        rank: of all ranks, the one at the other end of a message; None where the backend does not
            say which it was.

    Raises:
        RanksDisagreeError
    """
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        lost = "lost" if rank is None else f"lost rank {rank}"
        raise RanksDisagreeError(
            f"A collective {lost} ({reason}). Every rank of the group must call it. Look for the "
            "rank whose error came first."
        ) from error


def default_store() -> Store:
    """The store through which all ranks of the job can leave messages for each other."""
    return dist.distributed_c10d._get_default_store()
