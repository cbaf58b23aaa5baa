"""The flags of a launch script, read as the host's parser would, without running that."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

from megatron_distopt.config import Switch, config_from_namespace
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.generations import MEGATRON_CORE
from megatron_distopt.hosts.megatron_2023.facts import CONFLICTS, FLAG
from megatron_distopt.hosts.megatron_core.facts import REFUSED
from megatron_distopt.hosts.source.found import ParserOption, Survey
from megatron_distopt.plugin.arguments import add_arguments, check_spelling
from megatron_distopt.plugin.doctor.findings import Finding, noted, ok, problem

__all__ = ["check_launch_flags", "flag_of", "read_flags"]

_SECTION = "launch"


def flag_of(found: Survey | None) -> str:
    """How the host's parser spells the flag; as most do, where it has no parser."""
    spelt = [option.flag for option in (found.options if found else ()) if option.name == FLAG]
    return spelt[0] if spelt else f"--{FLAG.replace('_', '-')}"


def read_flags(words: Sequence[str], options: Sequence[ParserOption]) -> SimpleNamespace:
    """What the host's `args` would hold of the words; attributes that were not given are missing.

    Args:
        words: flags and their values.
        options: of the host's parser; other flags get their own name, and True where no value follows.

    >>> read_flags(["--DDP-impl", "torch", "--deepspeed"], [])
    namespace(DDP_impl='torch', deepspeed=True)
    """
    known: Mapping[str, ParserOption] = {option.flag: option for option in options}
    parsed = SimpleNamespace()
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.startswith("--"):
            option = known.get(flag)
            name = option.name if option else flag[2:].replace("-", "_")
            follows = [after for after in words[index + 1 : index + 2] if not after.startswith("--")]
            given = value or (follows[0] if follows else True)
            setattr(parsed, name, given if option is None or option.value is None else option.value)
    return parsed


def check_launch_flags(words: Sequence[str], found: Survey | None, switch: Switch) -> Iterator[Finding]:
    """Findings about a launch script's flags.

    Args:
        words: nothing is checked where there are none.
        found: what the host's source says, None where there is no host.
        switch: with `REQUIRE`, a missing flag is a problem.
    """
    if not words:
        return
    options = found.options if found else ()
    parsed = read_flags(words, options)
    is_given = getattr(parsed, FLAG, False) and any(word.partition("=")[0] == flag_of(found) for word in words)
    yield from _spelling(words, options, flag_of(found))
    if found is not None and found.generation.is_supported:
        yield _presence(flag_of(found), bool(is_given), switch)
    if is_given:
        yield from (problem(_SECTION, "conflict", text) for text in _conflicts(parsed, found))
    try:
        config_from_namespace(parsed)
    except ConfigError as error:
        yield problem(_SECTION, "our flags", str(error))


def _spelling(words: Sequence[str], options: Sequence[ParserOption], flag: str) -> Iterator[Finding]:
    ours = add_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    known = list(dict.fromkeys([flag, *(option.flag for option in options), *ours]))
    for word in words:  # one by one, because the check stops at the first
        try:
            check_spelling([word], known)
        except ConfigError as error:
            yield problem(_SECTION, "spelling", str(error))


def _presence(flag: str, is_given: bool, switch: Switch) -> Finding:
    if is_given and switch is Switch.OFF:
        return noted(_SECTION, flag, "given, but MEGATRON_DISTOPT=0: the host's own distributed optimizer runs")
    if is_given:
        return ok(_SECTION, flag, "given: this optimizer is used")
    if switch is Switch.REQUIRE:
        rule, remedy = "be used when MEGATRON_DISTOPT=require", f"Add {flag}, or unset the variable"
        return problem(_SECTION, flag, refusal("run", f"without {flag}", rule, remedy))
    return noted(_SECTION, flag, f"not given: the package is inert; add {flag} to use it")


def _conflicts(parsed: SimpleNamespace, found: Survey | None) -> Iterator[str]:
    for conflict in CONFLICTS:
        if conflict.applies_to(parsed):
            yield conflict.refusal()
    is_core = found is not None and found.generation.name == MEGATRON_CORE.name
    for refused in REFUSED if is_core else ():
        if getattr(parsed, refused.option, False):
            yield refusal(refused.option, "set", "be off with this distributed optimizer", refused.remedy)
