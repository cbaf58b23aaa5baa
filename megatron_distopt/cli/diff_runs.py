"""`megatron-distopt diff` of two runs that have logged digests: at which step and param they parted, and why.

The order in which things differ tells causes apart. A step computes gradients from params and data, and then params
and moments from gradients. So gradients that differ while the params before were equal come from data, forward,
backward or the sum over ranks, and params that differ after equal gradients come from the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from megatron_distopt.checkpoint.digest_files import LoggedRun, LoggedStep, differing, is_digests, read_run
from megatron_distopt.checkpoint.digests import GRADS, DigestKey
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.cli.show import Answer, counted, listed, number_text, rows, titled
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.hosts.naming import canonical

#: Params of a kind that are named before they are only counted; --json has all.
_NAMED = 8
_WORDS = {GRADS: "gradients", MAIN: "params"}


def are_runs(first: Path, second: Path) -> bool:
    """Whether both paths hold digests, rather than checkpoints.

    Raises:
        CheckpointError: one is digests and the other one is not.
    """
    found = is_digests(first), is_digests(second)
    if any(found) and not all(found):
        digests, other = (first, second) if found[0] else (second, first)
        got = f"{digests}, which holds digests of a run, with {other}, which does not"
        rule = "be two checkpoints, or two folders that --distopt-log-digests wrote"
        remedy = "Write the digest folder of the other run" if other.exists() else f"Check the path {other}"
        raise CheckpointError(refusal("pair of paths", got, rule, remedy))
    return all(found)


def answer_about_runs(first: Path, second: Path) -> Answer:
    """Compares two runs.

    Raises:
        CheckpointError: a path holds no digests that can be read, or the runs have nothing to compare.
    """
    runs = _canonical(read_run(first)), _canonical(read_run(second))
    compared = _compare(*runs)
    return Answer(_document(runs, compared), _parts(runs, compared), status=1 if compared.parted else 0)


@dataclass(frozen=True)
class _Parted:
    """The first step at which something differs.

    Args:
        step: its number.
        before: the last step that both logged and at which nothing differs; None where this is the first common one.
        keys: what differs.
        facts: numbers of the step that differ, from both runs.
    """

    step: int
    before: int | None
    keys: Sequence[DigestKey]
    facts: Mapping[str, tuple[Any, Any]]

    def of(self, kind: str) -> list[str]:
        """Names of the params of which this kind differs."""
        return [key.name for key in self.keys if key.kind == kind]

    @property
    def kinds(self) -> list[str]:
        """Kinds that differ, in the order in which a step computes them."""
        order = {GRADS: 0, MAIN: 2}
        return sorted(dict.fromkeys(key.kind for key in self.keys), key=lambda kind: (order.get(kind, 1), kind))


@dataclass(frozen=True)
class _Compared:
    """The comparison of two runs.

    Args:
        common: steps that both logged.
        parted: the first step at which they differ; None where they are equal.
        num_params: that both have.
        only_first, only_second: names of params that one of them logged alone, over all common steps.
        not_compared: kinds that they keep in different dtypes, with these.
    """

    common: Sequence[int]
    parted: _Parted | None
    num_params: int
    only_first: Sequence[str]
    only_second: Sequence[str]
    not_compared: Mapping[str, str]


def _canonical(run: LoggedRun) -> LoggedRun:
    """The run with the names that params have with every host, where these are as many."""
    names = {key.name for step in run.steps.values() for key in step.digests}
    renamed = {name: canonical(name) for name in names}
    if len({*renamed.values()}) < len(names):
        return run
    return replace(run, steps={number: _renamed(step, renamed) for number, step in run.steps.items()})


def _renamed(step: LoggedStep, names: Mapping[str, str]) -> LoggedStep:
    return replace(step, digests={DigestKey(key.kind, names[key.name]): each for key, each in step.digests.items()})


def _compare(first: LoggedRun, second: LoggedRun) -> _Compared:
    common = sorted(first.steps.keys() & second.steps.keys())
    pairs = [(first.steps[number], second.steps[number]) for number in common]
    ours, theirs = (dict.fromkeys(key.name for pair in pairs for key in pair[side].digests) for side in (0, 1))
    if not common or not ours.keys() & theirs.keys():
        raise _nothing_in_common(first, second, has_steps=bool(common))
    return _Compared(
        common,
        _first_difference(pairs),
        len(ours.keys() & theirs.keys()),
        [name for name in ours if name not in theirs],
        [name for name in theirs if name not in ours],
        {kind: text for one, other in pairs for kind, text in _other_dtypes(one, other)},
    )


def _nothing_in_common(first: LoggedRun, second: LoggedRun, *, has_steps: bool) -> CheckpointError:
    if has_steps:
        rule, remedy = "have params of the same names", "Compare two runs of one model"
        return CheckpointError(refusal("pair of runs", "no param in common", rule, remedy))
    shown = (f"{run.path} logged {_steps_text(run)}" for run in (first, second))
    rule, remedy = "have logged a step in common", "Log both with the same --distopt-log-digests"
    return CheckpointError(refusal("pair of runs", " and ".join(shown), rule, remedy))


def _steps_text(run: LoggedRun) -> str:
    numbers = sorted(run.steps)
    return f"steps {numbers[0]:,} to {numbers[-1]:,}, every {run.starts[-1].every:,}" if numbers else "no step"


def _first_difference(pairs: Sequence[tuple[LoggedStep, LoggedStep]]) -> _Parted | None:
    before = None
    for one, other in pairs:
        keys, facts = differing(one, other), _other_facts(one, other)
        if keys or "updated" in facts:
            return _Parted(one.number, before, keys, facts)
        before = one.number
    return None


def _other_facts(one: LoggedStep, other: LoggedStep) -> dict[str, tuple[Any, Any]]:
    """Numbers that both say and that differ. A norm also differs where only the parallel sizes do."""
    both = [name for name in one.facts if name in other.facts]
    return {name: (one.facts[name], other.facts[name]) for name in both if one.facts[name] != other.facts[name]}


def _other_dtypes(one: LoggedStep, other: LoggedStep) -> Iterator[tuple[str, str]]:
    for kind, dtype in one.dtypes.items():
        if other.dtypes.get(kind, dtype) != dtype:
            yield kind, f"{dtype} and {other.dtypes[kind]}"


# --- what it says


def _word(kind: str) -> str:
    return _WORDS.get(kind, kind)


def _meaning(parted: _Parted) -> str:
    """What the order of the differences says about the cause."""
    if "updated" in parted.facts:
        return "one run skipped this step and the other did not: their loss scales or gradients differ"
    if parted.before is None:
        if parted.step == 0 or GRADS not in parted.kinds:
            return "they differ at the first step that both logged: initial weights, or the checkpoint"
        return "they differ at the first step that both logged; what came first is not known"
    if parted.step - parted.before > 1:
        return (
            f"they parted in steps {parted.before + 1:,} to {parted.step:,}; to see in which, and what came first, "
            f"resume both from a checkpoint of step {parted.before:,} or before with --distopt-log-digests 1"
        )
    if GRADS in parted.kinds:
        return (
            "gradients differ first, and params and state before them were equal: data, forward, backward, or the sum "
            "over ranks"
        )
    if {"lr", "weight_decay"} & parted.facts.keys():
        return "gradients are equal and what the update made of them differs: options of the optimizer differ"
    return "gradients are equal and what the update made of them differs: the update, its options, clipping or kernel"


def _verdict(compared: _Compared) -> str:
    parted = compared.parted
    if parted is None:
        last = f"{counted(len(compared.common), 'step')} that both logged, to step {compared.common[-1]:,}"
        return f"equal to the bit: {counted(compared.num_params, 'param')} at {last}"
    kinds = ", ".join(f"{_word(kind)} of {counted(len(parted.of(kind)), 'param')}" for kind in parted.kinds)
    return f"parted at step {parted.step:,}: {kinds or 'updated'}"


def _document(runs: tuple[LoggedRun, LoggedRun], compared: _Compared) -> dict[str, Any]:
    parted = compared.parted
    return {
        "runs": [str(run.path) for run in runs],
        "is_equal": parted is None,
        "common_steps": [*compared.common],
        "parted": None
        if parted is None
        else {
            "step": parted.step,
            "last_equal_step": parted.before,
            "params": {kind: parted.of(kind) for kind in parted.kinds},
            "facts": {name: list(values) for name, values in parted.facts.items()},
            "meaning": _meaning(parted),
        },
        "only_in_first": list(compared.only_first),
        "only_in_second": list(compared.only_second),
        "not_compared": dict(compared.not_compared),
        "changed_at_start": [
            {str(step): sorted({key.name for key in keys}) for step, keys in run.changed.items()} for run in runs
        ],
        "incomplete": [run.incomplete for run in runs],
    }


def _parts(runs: tuple[LoggedRun, LoggedRun], compared: _Compared) -> list[RenderableType]:
    heads = [(side, f"{run.path}, {_steps_text(run)}") for side, run in zip("AB", runs, strict=True)]
    parts: list[RenderableType] = [titled("runs", rows(heads))]
    notes = [*_notes(runs, compared)]
    if notes:
        parts.append(titled("beside that", rows(notes)))
    about = [*_about_rows(runs)]
    if compared.parted is not None:
        parts += [titled("how the runs differ as such", rows(about))] if about else []
        parts.append(titled(f"first at step {compared.parted.step:,}", rows(_parted_rows(compared.parted))))
        parts.append(Text(_meaning(compared.parted)))
    return [*parts, Text(_verdict(compared))]


def _parted_rows(parted: _Parted) -> Iterator[tuple[str, str]]:
    yield "equal before", "nothing that both logged" if parted.before is None else f"step {parted.before:,}"
    for kind in parted.kinds:
        yield _word(kind), listed(parted.of(kind), most=_NAMED)
    for name, (one, other) in parted.facts.items():
        yield name, f"{number_text(one)} in A, {number_text(other)} in B"


def _notes(runs: tuple[LoggedRun, LoggedRun], compared: _Compared) -> Iterator[tuple[str, str]]:
    for side, names in (("A", compared.only_first), ("B", compared.only_second)):
        if names:
            yield f"in {side} alone", listed(names, most=_NAMED)
    for kind, dtypes in compared.not_compared.items():
        yield f"{_word(kind)}: not compared", dtypes
    for side, run in zip("AB", runs, strict=True):
        for step, keys in run.changed.items():
            names = list(dict.fromkeys(key.name for key in keys))
            yield side, f"resumed after step {step:,} with other values of {listed(names, most=_NAMED)}"
        if run.incomplete:
            yield side, run.incomplete


def _about_rows(runs: tuple[LoggedRun, LoggedRun]) -> Iterator[tuple[str, str, str]]:
    """What the runs said of themselves at their last start, where it differs."""
    ours, theirs = (run.starts[-1].about for run in runs)
    differ = [what for what in dict.fromkeys([*ours, *theirs]) if ours.get(what) != theirs.get(what)]
    if differ:
        yield "what", "A", "B"
    for what in differ:
        yield what, str(ours.get(what, "not said")), str(theirs.get(what, "not said"))
