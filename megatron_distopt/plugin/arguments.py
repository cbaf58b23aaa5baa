"""Our flags, in a host's parser or in that of a script: `--distopt-adam`, `--distopt-nonfinite` and so on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from megatron_distopt.config import (
    ADAM_SOURCES,
    FREE_OPTIONS,
    DistOptConfig,
    NonFinitePolicy,
    Switch,
    config_from_namespace,
    flag_of,
    switch_from,
)
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.patch_points import Replacement

__all__ = ["add_arguments", "check_spelling", "config_from_arguments", "parser_with_ours"]

_PREFIX = "--distopt-"
#: The host's flag, in the spelling of most forks.
_FLAG = "--use-distributed-optimizer"
_SWITCHES = ("async_save", "overlap_grad_reduce", "overlap_param_gather", "shared_memory", "debug")
_HELP = {
    "adam": f"which implementation of Adam: auto, {', '.join(ADAM_SOURCES)}",
    "optimizer": "adam, sgd, or module:Class of an element-wise torch.optim.Optimizer",
    "nonfinite": f"on inf or nan in a gradient: {', '.join(policy.value for policy in NonFinitePolicy)}",
    "accelerator": "who names the device: auto, deepspeed, torch",
    "decay": "weight decay of Adam: decoupled, or l2 as some forks have it off CUDA",
    "resume_step": "updates that a checkpoint has seen, for one that does not say it",
    "checkpoint_format": "of the optimizer's files: distopt, which loads at any size, or native, the fork's own",
    "async_save": "train on while a copy of the optimizer state is written",
    "async_buffer_mb": "memory for that copy on each rank, in MB",
    "keep_last": "how many checkpoints of the optimizer stay; the model's files are the fork's",
    "overlap_grad_reduce": "reduce buckets beside backward: yes, no, or auto for where that is safe",
    "overlap_param_gather": "gather params beside the next forward pass",
    "bucket_size": "elements of a bucket",
    "reduce_dtype": "bfloat16 or float16, which fp32 grads are rounded to on their way",
    "debug": "an access to params or gradients that are under way is an error with its line; slow",
    "shared_memory": "ranks on one machine exchange what is on the CPU through memory",
    "log_communication": "log how much of a step's communication was hidden, every so many steps",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that no host has a flag for; each also with underscores, as some forks spell theirs.

    Args:
        parser: the script's own; one that has them already is left as it is.

    Returns:
        The same parser.

    >>> args = add_arguments(argparse.ArgumentParser()).parse_args(["--distopt-nonfinite", "skip"])
    >>> config_from_arguments(args).nonfinite
    'skip'
    """
    if _spellings("adam")[0] in _known_to(parser):
        return parser
    group = parser.add_argument_group("megatron_distopt")
    for name in FREE_OPTIONS:
        default = getattr(DistOptConfig, name)
        # A switch stands alone; with a value it can be switched off again behind a script's own flags.
        switch: dict[str, Any] = {"nargs": "?", "const": "yes"} if name in _SWITCHES else {}
        text = f"{_HELP[name]} ({default})"
        group.add_argument(*_spellings(name), dest=f"distopt_{name}", metavar="NAME", help=text, **switch)
    return parser


def _spellings(name: str) -> tuple[str, str]:
    return flag_of(name), f"--distopt_{name}"


def _known_to(parser: argparse.ArgumentParser) -> list[str]:
    return list(parser._option_string_actions)


def config_from_arguments(args: argparse.Namespace, config: DistOptConfig | None = None) -> DistOptConfig:
    """`config` with what the flags of `add_arguments` say.

    Args:
        args: parsed.
        config: what code says, which stands before the flags; the defaults where None.

    Raises:
        ConfigError: a value that is none of those that the option takes.
    """
    return config_from_namespace(args, config)


def parser_with_ours(original: Callable[..., Any], check_arguments: Callable[[object], None]) -> Replacement:
    """What takes the place of a host's `parse_args`: our flags enter, conflicts are refused.

    Args:
        original: the host's, whose first parameter is `extra_args_provider`.
        check_arguments: refuses what was parsed and cannot be.
    """

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = parser if extra_args_provider is None else extra_args_provider(parser)
            check_spelling(sys.argv[1:], _known_to(add_arguments(parser)), abbreviated=parser.allow_abbrev)
            return parser

        parsed = original(provide, *args, **kwargs)
        if switch_from(os.environ) is not Switch.OFF:
            config_from_namespace(parsed)
            check_arguments(parsed)
        return parsed

    return Replacement(original, parse_args)


def check_spelling(words: Sequence[str], known: Sequence[str], *, abbreviated: bool = True) -> None:
    """Refuses a word that is nearly our flag or the host's: some hosts drop what they do not know.

    Args:
        words: of the command line.
        known: option strings of the parser.
        abbreviated: whether the parser takes the beginning of a flag for it.

    Raises:
        ConfigError

    >>> check_spelling(["--distopt-adam", "apex"], ["--distopt-adam"])
    """
    for word in words:
        flag = word.partition("=")[0]
        is_known = flag in known or (abbreviated and any(option.startswith(flag) for option in known))
        if flag.startswith("--") and not is_known and _is_about_us(flag):
            meant = [option for option in known if _is_about_us(option) and _is_nearly(flag) == _is_nearly(option)]
            close = get_close_matches(_hyphened(flag), meant, n=1, cutoff=0.5) or meant or [_FLAG]
            shown = [option for option in meant if not option.startswith("--distopt_")] or close
            raise ConfigError(refusal("flag", flag, f"be one of {', '.join(shown)}", f"Write {close[0]}"))


def _is_about_us(flag: str) -> bool:
    return _hyphened(flag).startswith(_PREFIX) or _is_nearly(flag)


def _is_nearly(flag: str) -> bool:
    """The host's flag, give or take a letter."""
    return bool(get_close_matches(_hyphened(flag), [_FLAG], n=1, cutoff=0.85))


def _hyphened(flag: str) -> str:
    return "--" + flag[2:].replace("_", "-")
