"""The generations of Megatron, told apart by what is there and never by a version string. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_distopt.errors import UnknownHostError, refusal
from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.patch_points import PatchPoint

__all__ = ["GENERATIONS", "MEGATRON_2023", "MEGATRON_CORE", "Generation", "recognise"]


@dataclass(frozen=True)
class Generation:
    """Forks with one contract.

    Args:
        name: for people.
        examples: who belongs to it.
        has: modules that all of them have.
        patch_points: what we replace there, the factory first; empty where it is not supported.
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
        """Why we cannot plug into it, None where an adapter exists."""
        rule = "be one that an adapter exists for; megatron-distopt hosts lists them"
        return None if self.is_supported else refusal("host", self.name, rule, self.remedy)


MEGATRON_CORE = Generation(
    "megatron-core",
    "megatron-core 0.16, Megatron-LM of 2026",
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
        remedy="Move the fork to megatron-core 0.16, or call megatron_distopt.distribute(...) on its model",
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
        UnknownHostError: none of those that we know.

    >>> recognise({"megatron.optimizer.distrib_optimizer", "megatron.arguments"}.__contains__).name
    'Megatron of 2023'
    """
    for generation in GENERATIONS:
        if all(map(has_module, generation.has)):
            return generation
    rule = "provide " + " or ".join(str(known.patch_points[0]) for known in GENERATIONS if known.patch_points)
    remedy = (
        "Start in the folder of your fork, or run pip install megatron-core==0.16.1, or use "
        "megatron_distopt.distribute(...) without a Megatron"
    )
    raise UnknownHostError(refusal("host", "no Megatron that we know", rule, remedy))
