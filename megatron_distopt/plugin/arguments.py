"""The flags of this package, `--distopt-adam` and so on, in the parser of a host or of a script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from megatron_distopt.config import (
    FREE_OPTIONS,
    OPTIONS,
    Switch,
    config_from_arguments,
    switch_from,
)
from megatron_distopt.errors import ConfigError
from megatron_distopt.options import flag_of
from megatron_distopt.patch_points import Replacement

_PREFIX = "--distopt-"
#: The host's flag, in the spelling of most forks.
HOSTS_FLAG = "--use-distributed-optimizer"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds a flag for each option that no host has a flag for, spelled with hyphens and with
    underscores.

    Args:
        parser: the script's own. If it has the flags already, it is not changed.

    Returns:
        The same parser.

    Examples:
        >>> parser = add_arguments(argparse.ArgumentParser())
        >>> args = parser.parse_args(["--distopt-nonfinite", "skip"])
        >>> config_from_arguments(args).nonfinite
        'skip'
    """
    if flag_of("adam") in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("megatron_distopt")
    for name in FREE_OPTIONS:
        declared = OPTIONS[name]
        # A switch may be given without a value. With one, a user can switch off what a launch
        # script has switched on.
        switch: dict[str, Any] = {"nargs": "?", "const": "yes"} if declared.is_switch else {}
        text = f"{declared.meaning} ({declared.values}; default {declared.shown_default})".replace(
            "%", "%%"
        )
        group.add_argument(
            flag_of(name),
            f"--distopt_{name}",
            dest=f"distopt_{name}",
            metavar="VALUE",
            help=text,
            **switch,
        )
    return parser


def parser_with_ours(
    original: Callable[..., Any], check_arguments: Callable[[object], None]
) -> Replacement:
    """Wraps a host's `parse_args` so that it takes the flags of this package and refuses
    conflicts."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = parser if extra_args_provider is None else extra_args_provider(parser)
            known = [*add_arguments(parser)._option_string_actions]
            check_spelling(sys.argv[1:], known, abbreviated=parser.allow_abbrev)
            return parser

        parsed = original(provide, *args, **kwargs)
        if switch_from(os.environ) is not Switch.OFF:
            config_from_arguments(parsed)
            check_arguments(parsed)
        return parsed

    return Replacement(original, parse_args)


def check_spelling(words: Sequence[str], known: Sequence[str], *, abbreviated: bool = True) -> None:
    """Refuses a misspelled flag of this package or of the host, because some hosts ignore flags
    that they do not know.

    `known` are the option strings of a parser; `abbreviated` says whether it accepts the beginning
    of a flag.
    """
    for word in words:
        flag = word.partition("=")[0]
        hyphened = "--" + flag[2:].replace("_", "-")
        is_known = flag in known or (
            abbreviated and any(option.startswith(flag) for option in known)
        )
        if not flag.startswith("--") or is_known:
            continue
        if hyphened.startswith(_PREFIX):
            valid = [option for option in known if option.startswith(_PREFIX)]
            close = get_close_matches(hyphened, valid, n=1, cutoff=0.5)
            meant = f"Did you mean {close[0]}?" if close else f"These exist: {', '.join(valid)}."
            raise ConfigError(f"There is no flag {flag}. {meant}")
        if get_close_matches(hyphened, [HOSTS_FLAG], n=1, cutoff=0.85):
            hosts = next(
                (option for option in known if option.replace("_", "-") == HOSTS_FLAG), HOSTS_FLAG
            )
            raise ConfigError(f"There is no flag {flag}. Did you mean {hosts}?")
