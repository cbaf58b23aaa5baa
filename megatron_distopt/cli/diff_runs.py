"""Where two runs that have logged digests parted, for `megatron-distopt diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from megatron_distopt.checkpoint.digests import GRADS, LoggedRun, LoggedStep, differing, read_run
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.cli import verdict
from megatron_distopt.cli.show import Answer, listed, plural, rows, titled
from megatron_distopt.errors import CheckpointError

#: More params than this are only counted; --json has all.
_NAMED = 8
#: The order in which a step computes what differs; moments come between.
_ORDER = {GRADS: 0, MAIN: 2}
_KIND_TEXTS = {GRADS: "gradients", MAIN: "params"}


@dataclass(frozen=True)
class Parting:
    """The first step that both have logged and at which they differ."""

    step: int
    last_equal_step: int | None
    params: dict[str, list[str]]  # whose digests differ, by kind, in the order of a step
    facts: dict[str, list[Any]]  # what else differs, such as the norm: of both runs

    @property
    def look(self) -> str:
        """Where to look for the cause."""
        if "updated" in self.facts:
            return f"{verdict.OVERFLOW}: one run skipped this step"
        if self.last_equal_step is None:
            return verdict.START
        after = self.last_equal_step + 1
        if after < self.step:
            return (
                f"steps {after:,} to {self.step:,}: resume both from a checkpoint of step "
                f"{after - 1:,} or before with --distopt-log-digests 1"
            )
        if GRADS in self.params:
            return verdict.GRADIENTS
        if "lr" in self.facts or "weight_decay" in self.facts:
            return verdict.OPTIONS
        return f"{verdict.UPDATE}: gradients are equal"


def answer_about_runs(first_path: Path, second_path: Path) -> Answer:
    """Compares two runs at the steps that both have logged."""
    first, second = read_run(first_path), read_run(second_path)
    both = sorted(first.steps.keys() & second.steps.keys())
    ours, theirs = _names(first, both), _names(second, both)
    common = ours.keys() & theirs.keys()
    if not common:
        shown = " and ".join(f"{run.path} has {_steps_text(run)}" for run in (first, second))
        raise CheckpointError(
            f"There is no step and param that both runs have logged: {shown}. Compare two runs of "
            "one model, with the same --distopt-log-digests."
        )
    parted = find_parting([(first.steps[step], second.steps[step]) for step in both])
    alone = [
        [name for name in ours if name not in common],
        [name for name in theirs if name not in common],
    ]
    heads = []
    for side, run, names in (("A", first, alone[0]), ("B", second, alone[1])):
        heads.append((side, f"{run.path}, {_steps_text(run)}"))
        heads.append((f"in {side} alone", listed(names, _NAMED)))
    parts: list[RenderableType] = [titled("runs", rows(heads))]
    outcome, document = verdict.Outcome.SAME, None
    counts = f"{plural(len(common), 'param')} at {plural(len(both), 'step')}"
    sentence = f"Equal to the bit: {counts}."
    if parted is not None:
        outcome = verdict.Outcome.DIFFERENT
        kinds, lines = [], []
        for kind, names in parted.params.items():
            text = _KIND_TEXTS.get(kind, kind)
            kinds.append(f"{text} of {plural(len(names), 'param')}")
            lines.append((text, listed(names, _NAMED)))
        for name, (one, other) in parted.facts.items():
            lines.append((name, f"{one} in A, {other} in B"))
        what = ", ".join(kinds) or "whether it is skipped"
        sentence = verdict.not_the_same(f"{what} at step {parted.step:,}", parted.look)
        parts.append(titled(f"first at step {parted.step:,}", rows(lines)))
        document = {**asdict(parted), "meaning": parted.look}
    parts.append(Text(sentence))
    return Answer(
        {
            "runs": [str(first.path), str(second.path)],
            "is_equal": parted is None,
            "common_steps": both,
            "parted": document,
            "only_in_first": alone[0],
            "only_in_second": alone[1],
        },
        parts,
        outcome.value,
    )


def _names(run: LoggedRun, steps: Sequence[int]) -> dict[str, None]:
    return dict.fromkeys(name for step in steps for _, name in run.steps[step].digests)


def find_parting(pairs: Sequence[tuple[LoggedStep, LoggedStep]]) -> Parting | None:
    """The first step at which a digest or "updated" differs; None where nothing does."""
    before: int | None = None
    for one, other in pairs:
        params: dict[str, list[str]] = {}
        keys = sorted(differing(one, other), key=lambda key: _ORDER.get(key[0], 1))
        for kind, name in keys:
            params.setdefault(kind, []).append(name)
        facts = {
            name: [value, other.facts[name]]
            for name, value in one.facts.items()
            if name in other.facts and value != other.facts[name]
        }
        # A norm also differs where only the parallel sizes do.
        if params or "updated" in facts:
            return Parting(one.number, before, params, facts)
        before = one.number
    return None


def _steps_text(run: LoggedRun) -> str:
    if not run.steps:
        return "no step"
    first, last = min(run.steps), max(run.steps)
    return f"steps {first:,} to {last:,}, every {run.every:,}"
