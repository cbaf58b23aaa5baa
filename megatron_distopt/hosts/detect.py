"""Which Megatron is around us, by what it can do and never by a version string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import UnknownHostError, refusal
from megatron_distopt.hosts.generations import MEGATRON_2023, MEGATRON_CORE, Generation, recognise
from megatron_distopt.hosts.megatron_2023.facts import check_flags
from megatron_distopt.hosts.patch_points import PatchPoint, Replacement

__all__ = ["Host", "find_host", "get_megatron_optimizer"]

#: Where the adapter of a generation is; it imports the host and is imported when its factory is replaced.
_ADAPTERS = {
    MEGATRON_CORE.name: "megatron_distopt.hosts.megatron_core.adapter",
    MEGATRON_2023.name: "megatron_distopt.hosts.megatron_2023.adapter",
}


@dataclass(frozen=True)
class Host:
    """A host that we can plug into.

    Args:
        name: for people.
        patch_point: its factory of optimizers.
        replacement: from the host's factory and our options to ours; imports the host.
        parser: its parser of arguments, where it has one that lets our flags in.
        check_arguments: refuses what was parsed and cannot be combined with its flag.
    """

    name: str
    patch_point: PatchPoint
    replacement: Callable[[Callable[..., Any], DistOptConfig], Replacement]
    parser: PatchPoint | None = None
    check_arguments: Callable[[object], None] = lambda args: None


def find_host() -> Host:
    """The host in this process.

    Raises:
        UnknownHostError: none of those that we know is importable, or one that has no adapter.
    """
    generation = recognise(_is_importable)
    reason = generation.refusal()
    if reason is not None:
        raise UnknownHostError(reason)
    return _host_of(generation)


def get_megatron_optimizer(*args: Any, options: DistOptConfig | None = None, **kwargs: Any) -> Any:
    """Collective: the host's function of that name, with our optimizer, without installing anything.

    Args:
        args, kwargs: whatever the host's function takes.
        options: ours; MEGATRON_DISTOPT_* variables override them.

    Returns:
        What the host's function returns; without its flag the host's own optimizer.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before training.
    """
    host = find_host()
    return host.replacement(host.patch_point.find(), options or DistOptConfig())(*args, **kwargs)


def _host_of(generation: Generation) -> Host:
    factory, *parsers = generation.patch_points

    def replace(original: Callable[..., Any], config: DistOptConfig) -> Replacement:
        ours: Replacement = import_module(_ADAPTERS[generation.name]).replacement(original, config)
        return ours

    if not parsers:
        return Host(generation.name, factory, replace)
    return Host(generation.name, factory, replace, parsers[0], check_flags)


def _is_importable(module: str) -> bool:
    """Imports the parents of `module`, and not itself."""
    try:
        return find_spec(module) is not None
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return False  # the module or a parent of it; anything else is what the fork itself misses
        rule, remedy = "be importable", "Install what it misses; NVIDIA apex is built from its sources"
        raise UnknownHostError(
            refusal("host", f"a Megatron that cannot be imported ({error})", rule, remedy)
        ) from error
