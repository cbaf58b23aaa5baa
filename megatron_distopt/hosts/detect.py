"""The generations of Megatron, and which one is installed: told apart by their modules, never by a version string.

Imports no host: the adapter of a generation does, and is imported when its factory is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import UnknownHostError, refusal
from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_2023.facts import check_flags
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.patch_points import PatchPoint, Replacement
from megatron_distopt.version import MEGATRON_CORE as RELEASES


@dataclass(frozen=True)
class Generation:
    """Forks with one contract.

    Args:
        name: for people.
        examples: forks of this generation.
        has: modules that all of them have.
        patch_points: what is replaced there, the factory first; empty where the generation is not supported.
        remedy: what to do instead, where it is not supported.
    """

    name: str
    examples: str
    has: tuple[str, ...]
    patch_points: tuple[PatchPoint, ...] = ()
    remedy: str = ""

    @property
    def is_supported(self) -> bool:
        """Whether an adapter exists."""
        return bool(self.patch_points)

    def refusal(self) -> str | None:
        """Says why the generation is not supported; None where an adapter exists."""
        rule = "be one that docs/hosts.md lists"
        return None if self.is_supported else refusal("host", self.name, rule, self.remedy)


MEGATRON_CORE = Generation(
    "megatron-core",
    "megatron-core 0.9 to 0.19, Megatron-LM of 2024 to 2026",
    ("megatron.core.optimizer",),
    (megatron_core.PATCH_POINT,),
)
MEGATRON_2023 = Generation(
    "Megatron of 2023",
    "Megatron-DeepSpeed, Megatron-LM 23.04 to 23.08 and their children",
    ("megatron.optimizer.distrib_optimizer", "megatron.arguments"),
    (megatron_2023.PATCH_POINT, megatron_2023.PARSER),
)

#: In the order in which they are asked: the first whose modules are all there is the one.
GENERATIONS = (
    Generation(
        "GPT-NeoX",
        "EleutherAI/gpt-neox",
        ("megatron.neox_arguments",),
        remedy='Write "zero_optimization": {"stage": 1} in its DeepSpeed config: the engine owns its optimizer',
    ),
    MEGATRON_CORE,
    Generation(
        "Megatron-LM with megatron-core 0.4 or 0.5",
        "Megatron-LM of early 2024",
        ("megatron.optimizer.distrib_optimizer", "megatron.core.distributed"),
        remedy="Move the fork to megatron-core 0.9 or newer, or call megatron_distopt.distribute(...) on its model",
    ),
    MEGATRON_2023,
    Generation(
        "Megatron without a distributed optimizer",
        "Megatron-LM 2.5 and 2.6, BigScience Megatron-DeepSpeed",
        ("megatron.optimizer", "megatron.mpu"),
        remedy="Call megatron_distopt.distribute(...) on its model in place of its DistributedDataParallel",
    ),
)


def recognise(has_module: Callable[[str], bool]) -> Generation:
    """The generation of a fork.

    Args:
        has_module: whether the fork has a module of that dotted name.

    Raises:
        UnknownHostError: no generation has these modules.

    >>> recognise({"megatron.optimizer.distrib_optimizer", "megatron.arguments"}.__contains__).name
    'Megatron of 2023'
    """
    for generation in GENERATIONS:
        if all(map(has_module, generation.has)):
            return generation
    rule = "provide " + " or ".join(str(known.patch_points[0]) for known in GENERATIONS if known.patch_points)
    remedy = (
        f'Start in the folder of your fork, or run pip install "{RELEASES}", or use '
        "megatron_distopt.distribute(...) without a Megatron"
    )
    raise UnknownHostError(refusal("host", "no Megatron that we know", rule, remedy))


#: Where the adapter of a generation is; it imports the host and is imported when its factory is replaced.
_ADAPTERS = {
    MEGATRON_CORE.name: "megatron_distopt.hosts.megatron_core.adapter",
    MEGATRON_2023.name: "megatron_distopt.hosts.megatron_2023.adapter",
}


@dataclass(frozen=True)
class Host:
    """A supported host.

    Args:
        name: for people.
        patch_point: its factory of optimizers.
        replacement: makes a replacement of the host's factory, given that and options; imports the host.
        parser: its `parse_args`, where it has one that takes more flags.
        check_arguments: refuses what was parsed and cannot be combined with its flag.
        take_over: replaces what other factories than the host's own construct, given options; returns the undo.
    """

    name: str
    patch_point: PatchPoint
    replacement: Callable[[Callable[..., Any], DistOptConfig], Replacement]
    parser: PatchPoint | None = None
    check_arguments: Callable[[object], None] = lambda args: None
    take_over: Callable[[DistOptConfig], Callable[[], None]] = lambda config: lambda: None


def find_host() -> Host:
    """The host in this process.

    Raises:
        UnknownHostError: no generation is importable, or one without an adapter.
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
        options: options of this package; flags and MEGATRON_DISTOPT_* variables set the others.

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

    def take_over(config: DistOptConfig) -> Callable[[], None]:
        undo: Callable[[], None] = import_module(_ADAPTERS[generation.name]).take_over(config)
        return undo

    if not parsers:
        return Host(generation.name, factory, replace, take_over=take_over)
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
