"""The generations of Megatron, and which one is installed. Their modules identify them, never a
version string.

Imports no host. The adapter of a generation does; it is imported when the factory is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import UnknownHostError
from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.patch_points import PatchPoint, Replacement, Undos
from megatron_distopt.version import MEGATRON_CORE as RELEASES


@dataclass(frozen=True)
class Generation:
    """Forks that have the same interface."""

    name: str  # for people
    examples: str
    has: tuple[str, ...]  # modules that all of them have
    #: The functions that are replaced: the factory of optimizers, and the parser if it has one that
    #: takes more flags. Empty if the generation is not supported.
    patch_points: tuple[PatchPoint, ...] = ()
    adapter: str = ""  # the module, which imports the host
    # refuses arguments that cannot be combined with its flag
    check_arguments: Callable[[object], None] = lambda args: None
    remedy: str = ""  # what to do instead, if it is not supported

    @property
    def is_supported(self) -> bool:
        return bool(self.patch_points)

    @property
    def factory(self) -> PatchPoint:
        return self.patch_points[0]

    @property
    def parser(self) -> PatchPoint | None:
        """The host's `parse_args`; None if it has none."""
        return self.patch_points[1] if len(self.patch_points) > 1 else None

    def replacement(self, original: Callable[..., Any], options: DistOptConfig) -> Replacement:
        """Makes the replacement of the host's factory; imports the host."""
        return Replacement(original, partial(import_module(self.adapter).build, original, options))

    def take_over(self, options: DistOptConfig, undos: Undos) -> None:
        """Replaces classes that factories other than the host's own construct, if the adapter has a
        function for it."""
        adapter = import_module(self.adapter)
        if hasattr(adapter, "take_over"):
            adapter.take_over(options, undos)


MEGATRON_CORE = Generation(
    "megatron-core",
    "megatron-core 0.9 to 0.19, Megatron-LM of 2024 to 2026",
    ("megatron.core.optimizer",),
    (megatron_core.PATCH_POINT,),
    "megatron_distopt.hosts.megatron_core.get_in",
)
MEGATRON_2023 = Generation(
    "Megatron of 2023",
    "Megatron-DeepSpeed, Megatron-LM 23.04 to 23.08 and forks of them",
    ("megatron.optimizer.distrib_optimizer", "megatron.arguments"),
    (megatron_2023.PATCH_POINT, megatron_2023.PARSER),
    "megatron_distopt.hosts.megatron_2023.get_in",
    megatron_2023.check_flags,
)

#: In the order in which they are tried: the first whose modules are all present is the host.
GENERATIONS = (
    Generation(
        "GPT-NeoX",
        "EleutherAI/gpt-neox",
        ("megatron.neox_arguments",),
        remedy="Its DeepSpeed engine has an optimizer of its own. Write "
        '"zero_optimization": {"stage": 1} in the DeepSpeed config',
    ),
    MEGATRON_CORE,
    Generation(
        "Megatron-LM with megatron-core 0.4 or 0.5",
        "Megatron-LM of early 2024",
        ("megatron.optimizer.distrib_optimizer", "megatron.core.distributed"),
        remedy="Move the fork to megatron-core 0.9 or newer, or call "
        "megatron_distopt.distribute(...) on its model",
    ),
    MEGATRON_2023,
    Generation(
        "Megatron without a distributed optimizer",
        "Megatron-LM 2.5 and 2.6, BigScience Megatron-DeepSpeed",
        ("megatron.optimizer", "megatron.mpu"),
        remedy="Call megatron_distopt.distribute(...) on its model in place of its "
        "DistributedDataParallel",
    ),
)


def recognise(has_module: Callable[[str], bool]) -> Generation:
    """The generation of a fork. `has_module` says whether it has a module of a dotted name."""
    for generation in GENERATIONS:
        if all(map(has_module, generation.has)):
            return generation
    factories = " or ".join(str(known.factory) for known in GENERATIONS if known.is_supported)
    raise UnknownHostError(
        f"No Megatron was found that provides {factories}. Start in the folder of your fork, or "
        f'run pip install "{RELEASES}". Without a Megatron, call megatron_distopt.distribute(...).'
    )


def recognise_supported(has_module: Callable[[str], bool]) -> Generation:
    """The generation of a fork. Raises if it has no adapter."""
    found = recognise(has_module)
    if not found.is_supported:
        raise UnknownHostError(f"The host is {found.name}, which is not supported. {found.remedy}.")
    return found


def find_host() -> Generation:
    """The generation of the Megatron that this process imports. Raises if it has no adapter."""
    return recognise_supported(_is_importable)


def get_megatron_optimizer(*args: Any, options: DistOptConfig | None = None, **kwargs: Any) -> Any:
    """Collective: calls the host's function of that name with our optimizer, without installing
    anything.

    Args:
        args, kwargs: the arguments of the host's function.
        options: options of this package; flags and MEGATRON_DISTOPT_* variables set the others.

    Returns:
        What the host's function returns. Without the host's flag, the host's own optimizer.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before training.
    """
    host = find_host()
    return host.replacement(host.factory.find(), options or DistOptConfig())(*args, **kwargs)


def _is_importable(module: str) -> bool:
    """Whether a module can be imported. Imports its parents, but not the module itself."""
    try:
        return find_spec(module) is not None
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            # The module or a parent is missing. Any other module is one that the fork needs.
            return False
        raise UnknownHostError(
            f"This Megatron cannot be imported ({error}). Install the missing module; NVIDIA apex "
            "has to be built from its sources."
        ) from error
