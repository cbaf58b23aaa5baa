"""`megatron-distopt diff` of two runs that have logged digests: at which step and param they parted, and why.

The order in which things differ tells causes apart. A step computes gradients from params and data, and then params
and moments from gradients. So gradients that differ while the params before were equal come from data, forward,
backward or the sum over ranks, and params that differ after equal gradients come from the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from megatron_distopt.checkpoint.digests import GRADS, LoggedRun, LoggedStep, differing, is_digest_file, read_run
from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.cli.show import Answer, counted, listed, number_text, rows, titled
from megatron_distopt.errors import CheckpointError

#: Params of a kind that are named before they are only counted; --json has all.
_NAMED = 8
#: The order in which a step computes what differs; moments come between.
_ORDER = {GRADS: 0, MAIN: 2}


def are_runs(first: Path, second: Path) -> bool:
    """Whether both paths are digest files, rather than checkpoints.

    Raises:
        CheckpointError: one is a digest file and the other one is not.
    """
    found = is_digest_file(first), is_digest_file(second)
    if any(found) and not all(found):
        digests, other = (first, second) if found[0] else (second, first)
        raise CheckpointError(
            f"{digests} holds digests of a run, and {other} does not. Name two checkpoints, or two files that "
            "--distopt-log-digests wrote."
        )
    return all(found)


def answer_about_runs(first: Path, second: Path) -> Answer:
    """Compares two runs at the steps that both have logged.

    Raises:
        CheckpointError: a file is damaged, or the runs have nothing to compare.
    """
    runs = read_run(first), read_run(second)
    steps = sorted(runs[0].steps.keys() & runs[1].steps.keys())
    pairs = [(runs[0].steps[step], runs[1].steps[step]) for step in steps]
    ours, theirs = (dict.fromkeys(name for pair in pairs for _, name in pair[side].digests) for side in (0, 1))
    common = ours.keys() & theirs.keys()
    if not common:
        shown = " and ".join(f"{run.path} has {_steps_text(run)}" for run in runs)
        raise CheckpointError(
            f"There is no step and param that both runs have logged: {shown}. Compare two runs of one model, with the "
            "same --distopt-log-digests."
        )
    parted = _first_difference(pairs)
    document: dict[str, Any] = {
        "runs": [str(first), str(second)],
        "is_equal": parted is None,
        "common_steps": steps,
        "parted": parted,
        "only_in_first": [name for name in ours if name not in theirs],
        "only_in_second": [name for name in theirs if name not in ours],
    }
    parts = _parts(runs, document)
    if parted is None:
        parts.append(Text(f"equal to the bit: {counted(len(common), 'param')} at {counted(len(steps), 'step')}"))
    return Answer(document, parts, status=int(parted is not None))


def _first_difference(pairs: Sequence[tuple[LoggedStep, LoggedStep]]) -> dict[str, Any] | None:
    """What differs at the first step at which a digest or "updated" does, as JSON values; None where nothing does."""
    before: int | None = None
    for one, other in pairs:
        keys = sorted(differing(one, other), key=lambda key: _ORDER.get(key[0], 1))
        both = [name for name in one.facts if name in other.facts]
        # A norm also differs where only the parallel sizes do.
        facts = {name: [one.facts[name], other.facts[name]] for name in both if one.facts[name] != other.facts[name]}
        if keys or "updated" in facts:
            params = {kind: [name for each, name in keys if each == kind] for kind, _ in keys}
            meaning = _meaning(one.number, before, {*params, *facts})
            found = {"step": one.number, "last_equal_step": before, "params": params, "facts": facts}
            return {**found, "meaning": meaning}
        before = one.number
    return None


def _meaning(step: int, before: int | None, differ: set[str]) -> str:
    """What the order of the differences says about the cause."""
    if "updated" in differ:
        return "one run skipped this step and the other did not: their loss scales or gradients differ"
    if before is None:
        return "they differ at the first step that both logged: initial weights, the checkpoint, or what came before"
    if step - before > 1:
        return (
            f"they parted in steps {before + 1:,} to {step:,}; to see in which, and what came first, resume both from "
            f"a checkpoint of step {before:,} or before with --distopt-log-digests 1"
        )
    if GRADS in differ:
        return "params and state before this step were equal: data, forward, backward, or the sum over ranks differ"
    if {"lr", "weight_decay"} & differ:
        return "gradients are equal, and options of the optimizer differ"
    return "gradients are equal, and the update differs: its options, clipping or kernel"


# --- for people


def _steps_text(run: LoggedRun) -> str:
    return f"steps {min(run.steps):,} to {max(run.steps):,}, every {run.every:,}" if run.steps else "no step"


def _kind_text(kind: str) -> str:
    return {GRADS: "gradients", MAIN: "params"}.get(kind, kind)


def _parts(runs: Sequence[LoggedRun], document: Mapping[str, Any]) -> list[RenderableType]:
    notes = [(f"{side}: {run.path}", _steps_text(run)) for side, run in zip("AB", runs, strict=True)]
    notes += [
        (f"in {side} alone", listed(document[f"only_in_{key}"], _NAMED))
        for side, key in zip("AB", ("first", "second"), strict=True)
    ]
    parted = document["parted"]
    if parted is None:
        return [titled("runs", rows(notes))]
    found = [(_kind_text(kind), listed(names, _NAMED)) for kind, names in parted["params"].items()]
    found += [(name, f"{number_text(a)} in A, {number_text(b)} in B") for name, (a, b) in parted["facts"].items()]
    kinds = [f"{_kind_text(kind)} of {counted(len(names), 'param')}" for kind, names in parted["params"].items()]
    return [
        titled("runs", rows(notes)),
        titled(f"first at step {parted['step']:,}", rows(found)),
        Text(parted["meaning"]),
        Text(f"parted at step {parted['step']:,}: {', '.join(kinds) or 'updated'}"),
    ]
