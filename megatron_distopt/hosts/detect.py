"""Which Megatron is around us, by what it can do and never by a version string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import UnknownHostError, refusal
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.seams import Seam

__all__ = ["Host", "find_host"]


@dataclass(frozen=True)
class Host:
    """A host that we can plug into.

    Args:
        name: for people.
        seam: its factory of optimizers.
        replacement: from the host's factory and our options to ours; imports the host.
    """

    name: str
    seam: Seam
    replacement: Callable[[Callable[..., Any], DistOptConfig], Callable[..., Any]]


def find_host() -> Host:
    """The host in this process.

    Raises:
        UnknownHostError: none of those that we know is importable.
    """
    if _is_importable(megatron_core.SEAM.module):
        return Host("megatron-core", megatron_core.SEAM, _replace_in_megatron_core)
    rule = f"provide {megatron_core.SEAM}"
    remedy = "Run pip install megatron-core==0.16.1, or use megatron_distopt.distribute(...) without a Megatron"
    raise UnknownHostError(refusal("host", "no Megatron that can be imported", rule, remedy))


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _replace_in_megatron_core(original: Callable[..., Any], config: DistOptConfig) -> Callable[..., Any]:
    adapter = import_module("megatron_distopt.hosts.megatron_core.adapter")
    ours: Callable[..., Any] = adapter.replacement(original, config)
    return ours
