"""`megatron-distopt doctor`: would training start here, and with what?

It reads the fork's source, the environment and the flags of the launch script (here), looks at this
Python and machine (doctor_machine), and tries to import the fork's training module in another
process (doctor_trial).
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
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace

from megatron_distopt.cli.doctor_trial import try_start
from megatron_distopt.cli.show import (
    Answer,
    Finding,
    Status,
    noted,
    ok,
    plural,
    problem,
    rows,
    titled,
)
from megatron_distopt.config import (
    FIXES_VARIABLE,
    DistOptConfig,
    Switch,
    config_from_arguments,
    config_from_environment,
    fixes_from,
    switch_from,
)
from megatron_distopt.errors import ConfigError, DistOptError
from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_2023.facts import FLAG
from megatron_distopt.hosts.megatron_core import facts as core
from megatron_distopt.plugin.arguments import HOSTS_FLAG, add_arguments, check_spelling
from megatron_distopt.plugin.detect import MEGATRON_CORE, Generation, recognise_supported
from megatron_distopt.plugin.entry_point_block import GROUP
from megatron_distopt.plugin.fixes import needed_fixes
from megatron_distopt.plugin.fork_source import (
    PatchPointInSource,
    SourceTree,
    fork_at,
    importable_host,
    patch_points_of,
)

_FORK, _ENVIRONMENT, _LAUNCH, _TRIAL = "fork", "environment", "launch", "trial"
_OUR_ENTRY_POINT = "megatron_distopt.plugin.entry_point:distopt"
_TRAINING_MODULE = "megatron.training"


def answer(parsed: argparse.Namespace) -> Answer:
    """Reports whether training could start, and with what."""
    findings = diagnose(parsed.fork, parsed.launch, has_trial=parsed.has_trial)
    num_problems = sum(finding.status is Status.PROBLEM for finding in findings)
    documents = [{**asdict(finding), "status": finding.status.value} for finding in findings]
    if num_problems:
        verdict = (
            f"{plural(num_problems, 'problem')} found: training with this optimizer could not start"
        )
    elif any(finding.section == _TRIAL and finding.status is Status.OK for finding in findings):
        verdict = "no problem found: the training module can be imported"
    else:
        verdict = "no problem found by reading the source; the import was not tried"
    parts = [
        titled(section, rows((each.status.value, each.subject, each.text) for each in of_it))
        for section, of_it in groupby(findings, key=lambda finding: finding.section)
    ]
    return Answer(
        {"can_start": not num_problems, "findings": documents},
        [*parts, verdict],
        1 if num_problems else 0,
    )


def diagnose(fork: Path | None, launch: Sequence[str], *, has_trial: bool = True) -> list[Finding]:
    """Finds out what can be known before a job is started; a `fork` of None is what this Python
    would import."""
    switch = Switch.ON
    with suppress(ConfigError):  # a bad one is a finding of its own
        switch = switch_from(os.environ)
    try:
        tree = importable_host([str(Path.cwd()), *sys.path]) if fork is None else fork_at(fork)
        generation = recognise_supported(tree.has)
        points = patch_points_of(tree, generation)
    except DistOptError as error:
        of_fork = [problem(_FORK, "source", str(error))]
        return [*of_fork, *_describe_machine(launch), *_variables(switch), *_entry_points(())]
    findings = [*describe_fork(tree, generation, points), *_describe_machine(launch)]
    findings += [*_variables(switch), *_entry_points(points)]
    stops_imports = any(
        each.status is Status.PROBLEM and each.section in (_FORK, _ENVIRONMENT) for each in findings
    )
    findings += [*check_launch_flags(launch, generation, switch), *_fixes(tree, switch)]
    if not has_trial:
        findings.append(noted(_TRIAL, "import", "not tried, because of --no-trial"))
    elif stops_imports:
        findings.append(noted(_TRIAL, "import", "not tried; fix the problems above first"))
    else:
        has_module = tree.has(_TRAINING_MODULE)
        module = _TRAINING_MODULE if has_module else generation.factory.module
        findings.append(try_start(fork or Path.cwd(), module))
    return findings


def describe_fork(
    tree: SourceTree, generation: Generation, points: Sequence[PatchPointInSource]
) -> Iterator[Finding]:
    """Yields a finding for everything that is replaced in the fork; what else the adapter needs is
    checked when training starts."""
    yield ok(_FORK, "source", ", ".join(map(str, tree.roots)))
    yield ok(_FORK, "generation", f"{generation.name}, like {generation.examples}")
    for point in points:
        name = point.patch_point.attribute
        if point.refusal is not None:
            yield problem(_FORK, name, point.refusal)
        else:
            yield ok(_FORK, name, f"free in {point.place}: ({', '.join(point.parameters)})")


# --- machine, environment and launch flags


def _describe_machine(launch: Sequence[str]) -> list[Finding]:
    if find_spec("torch") is None:
        return [problem("machine", "torch", "torch is not installed. Run pip install torch.")]
    config = DistOptConfig()
    with suppress(ConfigError):  # bad flags and variables are findings of their own
        given = config_from_arguments(read_flags(launch))
        config = config_from_environment(os.environ, given)
    # DeepSpeed logs to stdout while it is imported, and --json is one document
    with redirect_stdout(sys.stderr):
        return list(import_module("megatron_distopt.cli.doctor_machine").describe_machine(config))


def _refusals(section: str, subject: str, *checks: Callable[[], object]) -> Iterator[Finding]:
    """Yields a problem for each check that refuses."""
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield problem(section, subject, str(error))


def _variables(switch: Switch) -> Iterator[Finding]:
    checks = partial(switch_from, os.environ), partial(config_from_environment, os.environ)
    yield from (problems := [*_refusals(_ENVIRONMENT, "variables", *checks)])
    given = sorted(name for name in os.environ if name.startswith("MEGATRON_DISTOPT"))
    shown = ", ".join(f"{name}={os.environ[name]}" for name in given) or "none is set"
    if switch is Switch.OFF:
        text = f"{shown}: switched off, so the host's own optimizer runs"
        yield noted(_ENVIRONMENT, "variables", text)
    elif not problems:
        yield ok(_ENVIRONMENT, "variables", shown)


def _entry_points(points: Sequence[PatchPointInSource]) -> Iterator[Finding]:
    """Checks that a patched fork finds the entry point; without the entry point, the fork would
    silently train with its own optimizer."""
    is_patched = any(point.is_patched for point in points)
    if any(entry.value == _OUR_ENTRY_POINT for entry in entry_points(group=GROUP)):
        use = "it is not used until megatron-distopt patch --apply FORK"
        if is_patched:
            use = "the fork asks for it"
        yield ok(_ENVIRONMENT, "entry point", f"distopt is registered in {GROUP}; {use}")
    else:
        report = problem if is_patched else noted
        text = (
            f"distopt is not registered in {GROUP}, and a patched fork needs it. Run pip install "
            "megatron-distopt in this Python."
        )
        yield report(_ENVIRONMENT, "entry point", text)
    if find_spec("ray") is not None and points:
        text = (
            "Ray's workers are other processes than the driver. They train with the host's own "
            "optimizer until you run megatron-distopt patch --apply, or write "
            'runtime_env={"worker_process_setup_hook": "megatron_distopt.install"}'
        )
        if is_patched:
            text = "Ray's workers use the entry point"
        yield noted(_ENVIRONMENT, "ray", text)


def _fixes(tree: SourceTree, switch: Switch) -> Iterator[Finding]:
    is_made = switch is not Switch.OFF
    with suppress(ConfigError):  # a finding of its own
        is_made = is_made and fixes_from(os.environ)
    for fix in needed_fixes(tree):
        if is_made:
            yield noted(_TRIAL, "host fix", f"{fix}; {fix.why}")
        else:
            text = (
                f"{fix.module} needs a fix that is switched off ({fix.what}). Unset "
                f"{FIXES_VARIABLE} and MEGATRON_DISTOPT=0, or fix the fork."
            )
            yield problem(_TRIAL, "host fix", text)


def check_launch_flags(
    words: Sequence[str], generation: Generation, switch: Switch
) -> Iterator[Finding]:
    """Yields findings about the flags of a launch script."""
    if not words:
        return
    parsed = read_flags(words)
    is_underscored = "--" + FLAG in [word.partition("=")[0] for word in words]
    flag = "--" + FLAG if is_underscored else HOSTS_FLAG
    ours = add_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    # One by one, because the check stops at the first.
    checks: list[Callable[[], object]]
    checks = [partial(check_spelling, [word], [flag, *ours]) for word in words]
    checks.append(partial(config_from_arguments, parsed))
    yield from _refusals(_LAUNCH, "flags", *checks)
    is_given = hasattr(parsed, FLAG)
    if is_given and switch is Switch.OFF:
        text = "given, but with MEGATRON_DISTOPT=0 the host's own distributed optimizer runs"
        yield noted(_LAUNCH, flag, text)
    elif is_given:
        yield ok(_LAUNCH, flag, "given, so this optimizer is used")
    elif switch is Switch.REQUIRE:
        text = (
            f"MEGATRON_DISTOPT=require is set, but {flag} is not given. Add {flag}, or unset the "
            "variable."
        )
        yield problem(_LAUNCH, flag, text)
    else:
        yield noted(_LAUNCH, flag, f"not given, so this package does nothing; add {flag} to use it")
    if is_given:
        rows = core.REFUSED if generation is MEGATRON_CORE else megatron_2023.REFUSED
        for refusal in (row.refusal(parsed) for row in rows):
            if refusal is not None:
                yield problem(_LAUNCH, "conflict", refusal)


def read_flags(words: Sequence[str]) -> SimpleNamespace:
    """Launch flags by the names that a parser gives them, without running the host's: the value, or
    True where none follows; flags that are not given leave no attribute."""
    parsed = SimpleNamespace()
    for word, after in pairwise([*words, "--"]):
        flag, _, value = word.partition("=")
        if flag.startswith("--"):
            name = flag[2:].replace("-", "_")
            setattr(parsed, name, value or after.startswith("--") or after)
    return parsed
