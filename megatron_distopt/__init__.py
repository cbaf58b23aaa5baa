"""A better distributed optimizer (ZeRO stage 1) for Megatron forks, for megatron-core, and for any
torch module.

Importing this package is fast: torch, apex, deepspeed, transformer_engine and megatron are imported
only when they are used.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

from megatron_distopt.config import DistOptConfig, config_from_arguments
from megatron_distopt.version import OLDEST_TORCH
from megatron_distopt.version import VERSION as __version__

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer
    from megatron_distopt.hosts.torch.get_in import distribute
    from megatron_distopt.hosts.torch.optimizer import TorchDistributedOptimizer
    from megatron_distopt.layout import MatrixSpec
    from megatron_distopt.optimizer.owners.muon import Muon
    from megatron_distopt.plugin.arguments import add_arguments
    from megatron_distopt.plugin.detect import get_megatron_optimizer
    from megatron_distopt.plugin.install import Installation, install

__all__ = [
    "DistOptConfig",
    "DistributedOptimizer",
    "Installation",
    "MatrixSpec",
    "Muon",
    "TorchDistributedOptimizer",
    "__version__",
    "add_arguments",
    "config_from_arguments",
    "distribute",
    "get_megatron_optimizer",
    "install",
]

_LAZY = {
    "DistributedOptimizer": "megatron_distopt.hosts.megatron_2023.optimizer",
    "Installation": "megatron_distopt.plugin.install",
    "MatrixSpec": "megatron_distopt.layout",
    "Muon": "megatron_distopt.optimizer.owners.muon",
    "TorchDistributedOptimizer": "megatron_distopt.hosts.torch.optimizer",
    "add_arguments": "megatron_distopt.plugin.arguments",
    "distribute": "megatron_distopt.hosts.torch.get_in",
    "get_megatron_optimizer": "megatron_distopt.plugin.detect",
    "install": "megatron_distopt.plugin.install",
}


def _check_torch() -> None:
    """Refuses a torch that is too old, without importing it. A torch that was built in place has no
    metadata and is not checked."""
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    number = installed.split("+")[0].split(".")[:2]
    if all(map(str.isdecimal, number)) and tuple(map(int, number)) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"torch is {installed}, but megatron_distopt needs at least {oldest}. Run pip install "
            f"'torch>={oldest}'."
        )


_check_torch()


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ImportError as error:
        if ".megatron_2023." not in _LAZY[name]:
            raise
        # Patchers look for a class of this name in every loaded module, even without such a host,
        # and expect only AttributeError.
        raise AttributeError(f"{__name__}.{name} needs a Megatron of 2023: {error}") from error
