"""`megatron-distopt doctor`: would training start here, and with what? Reads, changes nothing, imports no host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, config_from_namespace, switch_from
from megatron_distopt.errors import ConfigError, DistOptError, refusal
from megatron_distopt.hosts.source.block import GROUP
from megatron_distopt.hosts.source.found import PatchPointState, Survey
from megatron_distopt.hosts.source.patchers import PATCHERS
from megatron_distopt.hosts.source.survey import survey
from megatron_distopt.hosts.source.tree import fork_at, importable_host
from megatron_distopt.plugin.doctor.findings import Finding, noted, ok, problem
from megatron_distopt.plugin.doctor.fork import describe_fork
from megatron_distopt.plugin.doctor.launch_flags import check_launch_flags, read_flags

__all__ = ["diagnose"]

_Check = Callable[[Mapping[str, str]], object]
_SECTION = "environment"
_OUR_ENTRY_POINT = "megatron_distopt.plugin.entry_point:distopt"


def diagnose(fork: Path | None, launch: Sequence[str]) -> list[Finding]:
    """Everything that can be known before a job is started.

    Args:
        fork: its folder; None for the Megatron that this Python would import.
        launch: flags of the launch script; none for no check of them.
    """
    found, reason = _read(fork)
    findings = [problem("fork", "source", reason)] if found is None else list(describe_fork(found))
    findings += _machine(found, _config(launch, found))
    findings += [*_variables(), _entry_point(found), *_other_entry_points(), *_patchers()]
    return [*findings, *check_launch_flags(launch, found, _switch() or Switch.ON)]


def _read(fork: Path | None) -> tuple[Survey | None, str]:
    try:
        return survey(importable_host(Path.cwd(), sys.path) if fork is None else fork_at(fork)), ""
    except DistOptError as error:
        return None, str(error)


def _machine(found: Survey | None, config: DistOptConfig) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield problem("machine", "torch", refusal("torch", "not installed", "be installed", "Run pip install torch"))
        return
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout while it is imported, and --json is one document
        describe = import_module("megatron_distopt.plugin.doctor.machine").describe_machine
        findings = list(describe(config, found))
    yield from findings


def _config(launch: Sequence[str], found: Survey | None) -> DistOptConfig:
    """What the run would use: flags win over variables. Bad ones are findings of their own."""
    try:
        flags = read_flags(launch, found.options if found is not None else ())
        return config_from_environment(os.environ, config_from_namespace(flags))
    except ConfigError:
        return DistOptConfig()


def _switch() -> Switch | None:
    try:
        return switch_from(os.environ)
    except ConfigError:
        return None


def _variables() -> Iterator[Finding]:
    given = sorted(name for name in os.environ if name.startswith("MEGATRON_DISTOPT"))
    checks: tuple[_Check, ...] = (switch_from, config_from_environment)
    reasons = [reason for reason in map(_reason, checks) if reason is not None]
    yield from (problem(_SECTION, "variables", reason) for reason in reasons)
    shown = ", ".join(f"{name}={os.environ[name]}" for name in given) or "no MEGATRON_DISTOPT variable is set"
    if _switch() is Switch.OFF:
        yield noted(_SECTION, "variables", f"{shown}: switched off, the host's own optimizer runs")
    elif not reasons:
        yield ok(_SECTION, "variables", shown)


def _reason(check: _Check) -> str | None:
    try:
        check(os.environ)
    except ConfigError as error:
        return str(error)
    return None


def _entry_point(found: Survey | None) -> Finding:
    """A fork with our block and without our entry point would silently train with its own optimizer."""
    is_patched = found is not None and any(
        patch_point.state is PatchPointState.PATCHED for patch_point in found.patch_points
    )
    if any(entry.value == _OUR_ENTRY_POINT for entry in entry_points(group=GROUP)):
        use = "the fork asks for it" if is_patched else "unused until megatron-distopt patch --apply FORK"
        return ok(_SECTION, "entry point", f"distopt is registered in {GROUP}; {use}")
    rule, remedy = f"be registered in {GROUP}, which the fork asks", "Run pip install megatron-distopt in this Python"
    if is_patched:
        return problem(_SECTION, "entry point", refusal("entry point distopt", "not registered", rule, remedy))
    return noted(_SECTION, "entry point", f"distopt is not registered in {GROUP}; {remedy[0].lower()}{remedy[1:]}")


def _other_entry_points() -> Iterator[Finding]:
    for entry in entry_points(group=GROUP):
        if entry.value != _OUR_ENTRY_POINT:
            yield noted(_SECTION, "entry point", f"also {entry.name} = {entry.value}; they are used in order of names")


def _patchers() -> Iterator[Finding]:
    for patcher in PATCHERS:
        if _is_installed(patcher.module):
            text = f"{patcher.module} ({patcher.owner}) replaces functions of Megatron too; install ours before it"
            yield noted(_SECTION, "other patcher", text)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # a stand-in in sys.modules, without a spec
        return True
