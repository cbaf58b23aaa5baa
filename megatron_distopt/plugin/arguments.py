"""Our flags, for a script that has a parser of its own: `--distopt-adam`, `--distopt-nonfinite` and so on."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron_distopt.config import ADAM_SOURCES, FREE_OPTIONS, DistOptConfig, NonFinitePolicy

__all__ = ["add_arguments", "config_from_arguments"]

_HELP = {
    "adam": f"which implementation of Adam: auto, {', '.join(ADAM_SOURCES)}",
    "optimizer": "adam, sgd, or module:Class of an element-wise torch.optim.Optimizer",
    "nonfinite": f"on inf or nan in a gradient: {', '.join(policy.value for policy in NonFinitePolicy)}",
    "accelerator": "who names the device: auto, deepspeed, torch",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that no host has a flag for.

    Args:
        parser: the script's own.

    Returns:
        The same parser.

    >>> args = add_arguments(argparse.ArgumentParser()).parse_args(["--distopt-nonfinite", "skip"])
    >>> config_from_arguments(args).nonfinite
    'skip'
    """
    group = parser.add_argument_group("megatron_distopt")
    for name in FREE_OPTIONS:
        default = getattr(DistOptConfig, name)
        group.add_argument(f"--distopt-{name}", metavar="NAME", help=f"{_HELP[name]} ({default})")
    return parser


def config_from_arguments(args: argparse.Namespace, config: DistOptConfig | None = None) -> DistOptConfig:
    """`config` with what the flags of `add_arguments` say.

    Args:
        args: parsed.
        config: what the flags override; the defaults where None.

    Raises:
        ConfigError: a value that is none of those that the option takes.
    """
    given: dict[str, Any] = {name: getattr(args, f"distopt_{name}", None) for name in FREE_OPTIONS}
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config or DistOptConfig(), **changes)
