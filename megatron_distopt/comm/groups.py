"""Process groups as the rest of the package sees them, and messages between two of their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_distopt.errors import ConfigError, InvariantError, RanksDisagreeError, refusal

_PROBED_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_were_used = Event()
#: torch's backend of ranks that do not exist: its collectives send nothing, and it has no store.
FAKE = "fake"


def is_initialized() -> bool:
    """Whether torch.distributed can communicate."""
    return dist.is_available() and dist.is_initialized()


def were_used() -> bool:
    """Whether a group was made use of, also where torch.distributed has ended since: something may
    still hold one."""
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
            remedy = (
                "Call torch.distributed.init_process_group first, or start with torchrun or "
                "deepspeed"
            )
            raise ConfigError(
                refusal("process group", "torch.distributed is not initialised", "exist", remedy)
            )
        # torch would take None for all ranks
        if getattr(handle, "group", handle) is None and handle is not None:
            found, remedy = (
                f"{type(handle).__name__} without a group",
                "Make the process groups again before this call",
            )
            raise ConfigError(refusal("process group", found, "exist", remedy))
        rank = dist.get_rank(handle)
        if rank < 0:
            raise ConfigError(
                f"The process group does not have rank {dist.get_rank()}, which was given it. Give "
                "each rank a group that it is in, or make this call on the ranks of the group "
                "alone."
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
                refusal(
                    "process group", "none", "be there until the last collective", "Report this"
                )
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
    def carriers(self) -> tuple[str, dict[str, str]]:
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
                put an object of their own around each, and replace torch's functions by ones that
                know it; not all of them.
        """
        try:
            return str(dist.get_backend(self.handle))
        except (TypeError, ValueError) as error:
            rule, remedy = (
                "be one of torch.distributed",
                "Call the framework's patch of torch.distributed before this",
            )
            raise ConfigError(
                refusal("process group", type(self.handle).__name__, rule, remedy)
            ) from error


def carrier_of(device: torch.device, group: Group) -> str:
    """The backend that moves tensors of a device in a group."""
    config, by_device = group.carriers
    return by_device.get(device.type, config)


@contextmanager
def named_losses(rank: int | None = None) -> Iterator[None]:
    """Turns a backend's error about a rank that ended or did not come into one of ours.

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
        rule, remedy = (
            "be called by every rank of its group",
            "Look for the rank whose error is the first one",
        )
        raise RanksDisagreeError(
            refusal("collective", f"{lost} ({reason})", rule, remedy)
        ) from error


# --- messages: matched by sender and tag, and independent of the collectives around them


def others(group: Group) -> list[int]:
    """The other ranks, downwards from the one before this rank, around the ring."""
    return [(group.rank - distance) % group.size for distance in range(1, group.size)]


@dataclass(frozen=True)
class Message:
    """A message under way."""

    work: dist.Work  # torch's
    rank: int  # at its other end, of all ranks

    def wait(self) -> None:
        """Waits until it has ended.

        Raises:
            RanksDisagreeError: another rank ended, or did not come within the group's time limit.
        """
        with named_losses(self.rank):
            self.work.wait()


def receive(into: Tensor, rank: int, tag: int, group: Group) -> Message:
    """Begins to receive from a rank of the group; raises as `Message.wait` where that rank has
    ended before."""
    return _begun(dist.irecv, into, group.global_rank(rank), tag, group)


def send(tensor: Tensor, rank: int, tag: int, group: Group) -> Message:
    """Begins to send to a rank of the group; raises as `receive`."""
    return _begun(dist.isend, tensor, group.global_rank(rank), tag, group)


def _begun(
    begin: Callable[..., dist.Work | None], tensor: Tensor, rank: int, tag: int, group: Group
) -> Message:
    with named_losses(rank):
        work = begin(tensor, rank, group.handle, tag)
    if work is None:  # torch's way to say that this process is not in the group
        rule = "hold every rank that communicates in it"
        raise InvariantError(refusal("process group", "without this rank", rule, "Report this"))
    return Message(work, rank)


def swap(mine: Tensor, tag: int, group: Group) -> list[Tensor]:
    """Collective: returns every rank's tensor, by rank; all of the same shape."""
    parts = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    received = [receive(parts[rank], rank, tag, group) for rank in others(group)]
    sent = [send(mine, rank, tag, group) for rank in others(group)]
    for message in (*received, *sent):
        message.wait()
    return parts
