"""`megatron-distopt doctor`: would training start here, and with what? Reads, changes nothing, imports no host.

From top to bottom: the command, the environment, the fork's source, the flags of the launch script. What this machine
has is in `doctor_machine`, which imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

from megatron_distopt.cli.doctor_core import describe_core
from megatron_distopt.cli.doctor_demands import read_flags
from megatron_distopt.cli.doctor_start import NO_SCRIPT, describe_start
from megatron_distopt.cli.show import Answer, Finding, Status, counted, noted, ok, problem, rows, titled
from megatron_distopt.config import DistOptConfig, Switch, config_from_arguments, config_from_environment, switch_from
from megatron_distopt.errors import ConfigError, DistOptError, refusal
from megatron_distopt.hosts.detect import MEGATRON_CORE
from megatron_distopt.hosts.megatron_2023.facts import CONFLICTS, FLAG
from megatron_distopt.hosts.megatron_core.facts import REFUSED
from megatron_distopt.hosts.source.block import GROUP
from megatron_distopt.hosts.source.found import (
    ClassFound,
    ParserOption,
    PatchPointFound,
    PatchPointState,
    Survey,
)
from megatron_distopt.hosts.source.survey import GROUP_FUNCTIONS, survey
from megatron_distopt.hosts.source.tree import SourceTree, fork_at, importable_host
from megatron_distopt.plugin.arguments import add_arguments, check_spelling

#: Sections of the report.
_FORK, _ENVIRONMENT, _LAUNCH = "fork", "environment", "launch"
_OUR_ENTRY_POINT = "megatron_distopt.plugin.entry_point:distopt"
_KINDS = {
    "per-rank files": "per-rank files: every data-parallel rank keeps its state in its own file",
    "gathered file": "gathered file: one file by the fork, a folder that loads at any size by ours",
}


#: Packages that replace functions of a Megatron, as this one does: importable name, and name for people.
_PATCHERS = {
    "mindspeed": "MindSpeed",
    "mindspeed_llm": "MindSpeed-LLM",
    "megatron_adaptor": "MindSpeed",
    "primus": "Primus",
    "megatron_patch": "Pai-Megatron-Patch",
    "musa_patch": "Moore Threads",
}


def answer(parsed: argparse.Namespace) -> Answer:
    """Reports whether training could start, and with what."""
    findings = diagnose(parsed.fork, parsed.launch)
    num_problems = sum(finding.status is Status.PROBLEM for finding in findings)
    documents = [{**asdict(finding), "status": finding.status.value} for finding in findings]
    verdict = _verdict(findings, num_problems)
    parts = [
        titled(section, rows((each.status.value, each.subject, each.text) for each in of_it))
        for section, of_it in groupby(findings, key=lambda finding: finding.section)
    ]
    return Answer({"can_start": not num_problems, "findings": documents}, [*parts, verdict], 1 if num_problems else 0)


def _verdict(findings: Sequence[Finding], num_problems: int) -> str:
    if num_problems:
        return f"{counted(num_problems, 'problem')}: this optimizer could not start"
    if any(finding.subject == NO_SCRIPT for finding in findings):
        return "no problem found in the host; whether your training script could start was not looked at"
    return "no problem found: this optimizer could start"


def diagnose(fork: Path | None, launch: Sequence[str]) -> list[Finding]:
    """Finds out everything that can be known before a job is started.

    Args:
        fork: its folder; None for the Megatron that this Python would import.
        launch: flags of the launch script; none for no check of them.
    """
    tree, found, reason = _read(fork)
    findings = [problem("fork", "source", reason)] if found is None else list(describe_fork(found))
    if tree is not None and found is not None and found.generation.is_supported:
        findings += [*describe_core(found, tree), *describe_start(found, tree, launch)]
    findings += _machine(found, _config(launch, found))
    findings += [*_variables(), _entry_point(found), *_other_entry_points(), *_patchers()]
    return [*findings, *check_launch_flags(launch, found, _switch())]


def _read(fork: Path | None) -> tuple[SourceTree | None, Survey | None, str]:
    try:
        tree = importable_host(Path.cwd(), sys.path) if fork is None else fork_at(fork)
        return tree, survey(tree), ""
    except DistOptError as error:
        return None, None, str(error)


def _machine(found: Survey | None, config: DistOptConfig) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield problem("machine", "torch", refusal("torch", "not installed", "be installed", "Run pip install torch"))
        return
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout while it is imported, and --json is one document
        describe = import_module("megatron_distopt.cli.doctor_machine").describe_machine
        findings = list(describe(config, found))
    yield from findings


def _config(launch: Sequence[str], found: Survey | None) -> DistOptConfig:
    """Returns the options of the run; bad flags and variables are findings of their own."""
    with suppress(ConfigError):
        flags = read_flags(launch, found.options if found is not None else ())
        return config_from_environment(os.environ, config_from_arguments(flags))
    return DistOptConfig()


def _switch() -> Switch:
    """Returns the value of MEGATRON_DISTOPT; a bad one is a finding of its own."""
    with suppress(ConfigError):
        return switch_from(os.environ)
    return Switch.ON


def _refusals(section: str, subject: str, *checks: Callable[[], object]) -> Iterator[Finding]:
    """Yields a problem for each check that refuses."""
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield problem(section, subject, str(error))


def _variables() -> Iterator[Finding]:
    checks = partial(switch_from, os.environ), partial(config_from_environment, os.environ)
    problems = list(_refusals(_ENVIRONMENT, "variables", *checks))
    yield from problems
    given = sorted(name for name in os.environ if name.startswith("MEGATRON_DISTOPT"))
    shown = ", ".join(f"{name}={os.environ[name]}" for name in given) or "no MEGATRON_DISTOPT variable is set"
    if _switch() is Switch.OFF:
        yield noted(_ENVIRONMENT, "variables", f"{shown}: switched off, the host's own optimizer runs")
    elif not problems:
        yield ok(_ENVIRONMENT, "variables", shown)


def _entry_point(found: Survey | None) -> Finding:
    """Checks that a patched fork finds the entry point; without it, it would train with its own optimizer unnoticed."""
    is_patched = found is not None and any(
        patch_point.state is PatchPointState.PATCHED for patch_point in found.patch_points
    )
    if any(entry.value == _OUR_ENTRY_POINT for entry in entry_points(group=GROUP)):
        use = "the fork asks for it" if is_patched else "unused until megatron-distopt patch --apply FORK"
        return ok(_ENVIRONMENT, "entry point", f"distopt is registered in {GROUP}; {use}")
    rule, remedy = f"be registered in {GROUP}, which the fork asks", "Run pip install megatron-distopt in this Python"
    if is_patched:
        return problem(_ENVIRONMENT, "entry point", refusal("entry point distopt", "not registered", rule, remedy))
    return noted(_ENVIRONMENT, "entry point", f"distopt is not registered in {GROUP}; {remedy[0].lower()}{remedy[1:]}")


def _other_entry_points() -> Iterator[Finding]:
    for entry in entry_points(group=GROUP):
        if entry.value != _OUR_ENTRY_POINT:
            text = f"also {entry.name} = {entry.value}; they are used in order of names"
            yield noted(_ENVIRONMENT, "entry point", text)


def _patchers() -> Iterator[Finding]:
    for module, owner in _PATCHERS.items():
        if _is_installed(module):
            text = f"{module} ({owner}) replaces functions of Megatron too; install megatron_distopt before it"
            yield noted(_ENVIRONMENT, "other patcher", text)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # a stand-in in sys.modules, without a spec
        return True


def describe_fork(found: Survey) -> Iterator[Finding]:
    """Yields a finding for everything that the adapter will ask of the fork."""
    yield ok(_FORK, "source", ", ".join(found.roots))
    yield _generation(found)
    if not found.generation.is_supported:
        return
    for patch_point in found.patch_points:
        yield from _patch_point(patch_point)
    if found.optimizer_class is not None:
        yield from _class(found.optimizer_class)
    yield _groups(found)
    yield _flag(found)
    for reason in found.unreadable.values():
        make = problem if reason in found.problems() else noted
        yield make(_FORK, "unreadable", reason)


def _refused(subject: str, reason: str | None, text: str) -> Finding:
    """Returns a problem where there is a reason, and otherwise the finding that all is well."""
    return ok(_FORK, subject, text) if reason is None else problem(_FORK, subject, reason)


def _generation(found: Survey) -> Finding:
    generation = found.generation
    return _refused("generation", generation.refusal(), f"{generation.name}, as {generation.examples}")


def _patch_point(found: PatchPointFound) -> Iterator[Finding]:
    name = found.patch_point.attribute
    with_block = ", with the look-up for entry points after it" if found.state is PatchPointState.PATCHED else ""
    text = f"free in {found.place}{with_block}: ({', '.join(found.parameters)})"
    yield _refused(name, found.refusal(), text)
    if found.importers:
        yield ok(_FORK, f"{name} by value", f"in {', '.join(map(str, found.importers))}; each is rebound")
    if found.assigners:
        yield noted(_FORK, f"{name} assigned", f"in {', '.join(map(str, found.assigners))}; what runs last wins")


def _class(found: ClassFound) -> Iterator[Finding]:
    if found.bound_in is not None:
        yield noted(_FORK, found.name, f"bound while {found.bound_in} runs, so it is looked at when training starts")
        return
    yield _refused(found.name, found.refusal(), f"constructor as expected in {found.place}")
    if found.kind is not None:
        yield ok(_FORK, "checkpoints", _KINDS[found.kind])


def _groups(found: Survey) -> Finding:
    if not found.group_functions:
        return noted(_FORK, "process groups", "its parallel state is not in this tree, so it was not looked at")
    there = ", ".join(name for name in GROUP_FUNCTIONS if name in found.group_functions)
    absent = ", ".join(name for name in GROUP_FUNCTIONS if name not in found.group_functions)
    if GROUP_FUNCTIONS[0] in found.group_functions:
        return ok(_FORK, "process groups", there + (f"; without {absent}" if absent else ""))
    remedy = "Use a Megatron that docs/hosts.md lists"
    got = f"no {GROUP_FUNCTIONS[0]}" + (f", only {there}" if there else "")
    return problem(_FORK, "process groups", refusal("parallel state", got, "name the data-parallel group", remedy))


def _flag(found: Survey) -> Finding:
    spelt = [option for option in found.options if option.flag == _hosts_flag(found)]
    if spelt:
        return ok(_FORK, "flag", f"{spelt[0].flag} ({spelt[0].place})")
    return noted(_FORK, "flag", "no parser here spells it; your script sets use_distributed_optimizer in its config")


def _hosts_flag(found: Survey | None) -> str:
    """Returns the host's flag as its parser spells it, or in the usual spelling where it has no parser."""
    spelt = [option.flag for option in (found.options if found else ()) if option.name == FLAG]
    return spelt[0] if spelt else f"--{FLAG.replace('_', '-')}"


def check_launch_flags(words: Sequence[str], found: Survey | None, switch: Switch) -> Iterator[Finding]:
    """Yields findings about the flags of a launch script.

    Args:
        words: flags and their values; nothing is checked where there are none.
        found: what the host's source says; None where there is no host.
        switch: with `REQUIRE`, a missing flag is a problem.
    """
    if not words:
        return
    options = found.options if found else ()
    parsed = read_flags(words, options)
    is_given = getattr(parsed, FLAG, False) and any(word.partition("=")[0] == _hosts_flag(found) for word in words)
    yield from _spelling(words, options, _hosts_flag(found))
    if found is not None and found.generation.is_supported:
        yield _presence(_hosts_flag(found), bool(is_given), switch)
    if is_given:
        yield from (problem(_LAUNCH, "conflict", text) for text in _conflicts(parsed, found))
    yield from _refusals(_LAUNCH, "our flags", partial(config_from_arguments, parsed))


def _spelling(words: Sequence[str], options: Sequence[ParserOption], flag: str) -> Iterator[Finding]:
    ours = add_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    known = list(dict.fromkeys([flag, *(option.flag for option in options), *ours]))
    # One by one, because the check stops at the first.
    yield from _refusals(_LAUNCH, "spelling", *(partial(check_spelling, [word], known) for word in words))


def _presence(flag: str, is_given: bool, switch: Switch) -> Finding:
    if is_given and switch is Switch.OFF:
        return noted(_LAUNCH, flag, "given, but MEGATRON_DISTOPT=0: the host's own distributed optimizer runs")
    if is_given:
        return ok(_LAUNCH, flag, "given: this optimizer is used")
    if switch is Switch.REQUIRE:
        rule, remedy = "be used when MEGATRON_DISTOPT=require", f"Add {flag}, or unset the variable"
        return problem(_LAUNCH, flag, refusal("run", f"without {flag}", rule, remedy))
    return noted(_LAUNCH, flag, f"not given: the package is inert; add {flag} to use it")


def _conflicts(parsed: SimpleNamespace, found: Survey | None) -> Iterator[str]:
    for conflict in CONFLICTS:
        if conflict.applies_to(parsed):
            yield conflict.refusal()
    is_core = found is not None and found.generation.name == MEGATRON_CORE.name
    for each in REFUSED if is_core else ():
        if getattr(parsed, each.option, False):
            yield refusal(each.option, "set", "be off with this distributed optimizer", each.remedy)
