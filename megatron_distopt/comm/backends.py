"""Which process groups this torch can make."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["available_backends", "default_backend"]

_PROBES = ("gloo", "nccl", "mpi", "ucc", "xccl")


def available_backends() -> tuple[str, ...]:
    """Names for `init_process_group`: torch's own that were compiled in, and those that other packages registered."""
    if not dist.is_available():
        return ()
    compiled = [name for name in _PROBES if getattr(dist, f"is_{name}_available", bool)()]
    registered = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake", *_PROBES)]
    return (*compiled, *registered)


def default_backend(device_type: str) -> str | None:
    """What torch takes for tensors of a device; None where it names none."""
    if not dist.is_available():
        return None
    by_device: dict[str, str] = getattr(dist.Backend, "default_device_backend_map", {})
    return by_device.get(device_type)
