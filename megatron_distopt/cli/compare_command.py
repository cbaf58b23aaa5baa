"""`megatron-distopt compare`: the user's own training with the host's optimizer and with ours, and
a verdict."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.text import Text

from megatron_distopt.cli.compare_launch import (
    DISTRIBUTED,
    LOADING,
    WRITING,
    end_by_signals,
    plus,
    train,
    with_runner,
    without,
)
from megatron_distopt.cli.compare_verdict import (
    TIMES,
    Deviation,
    apart_text,
    differences,
    exceeds_bounds,
    judge,
)
from megatron_distopt.cli.recorded_run import RecordedRun
from megatron_distopt.cli.show import Answer, rows
from megatron_distopt.cli.verdict import Outcome
from megatron_distopt.config import Switch
from megatron_distopt.errors import HostError

#: Relative change of a learning rate that shows only the effect of rounding: 16 units in the last
#: place of fp32, a few more than a norm that is summed in another order differs by.
_NUDGE = 2.0**-19
_SHOWN, _VALUES = ("loss", "gradient norm", "weights"), ("loss", "norm", "loss_scale", "skipped")
_TIMES, _MEMORY, _APART = "milliseconds an iteration", "peak memory by rank, GiB", "apart, relative"
# by run and what is shown; by iteration or by rank
_Figures = Mapping[str, Mapping[str, list[Any]]]


def answer(parsed: argparse.Namespace) -> Answer:
    """Runs the launch line with the host's optimizer and with ours, and compares."""
    left_out = WRITING if parsed.keep_load else f"{WRITING}|{LOADING}"
    line, notes = without(with_runner(parsed.launch), left_out), list[str]()
    parsed.output.mkdir(parents=True, exist_ok=True)
    end_by_signals()
    with tempfile.TemporaryDirectory(prefix="distopt-compare-") as scratch:
        run = partial(train, Path(scratch), parsed.iterations)
        own, ours, (outcome, sentence) = _compare(line, run, notes)
    if len(own.steps) < parsed.iterations:
        notes.append(
            f"The training ended after {len(own.steps)} iterations. Raise --train-iters to compare "
            "more."
        )
    figures = {"host's own": _figures(own), "ours": _figures(ours)}
    found = differences(own, ours)
    document = {
        "is_same": None if outcome is Outcome.NONE else outcome is Outcome.SAME,
        "verdict": sentence,
        "notes": [*notes],
        "launch": line,
        "runs": figures,
        "apart": [asdict(each) for each in found],
    }
    contents: dict[str, Callable[[], bytes]] = {
        "compare.json": lambda: Answer(document, ()).as_json().encode(),
        "compare.png": lambda: _picture(figures, found),
    }
    for name, content in contents.items():
        path, unfinished = parsed.output / name, parsed.output / f".{os.getpid()}"
        try:  # each is written as a whole or not at all
            unfinished.write_bytes(content())
            unfinished.replace(path)
            notes.append(f"Written: {path}.")
        except Exception as error:  # noqa: BLE001 - whatever it is, the runs have been made
            notes.append(f"{path} could not be written: {error}.")
    parts = [*_tables(figures, found), *map(Text, (*notes, sentence))]
    return Answer(document, parts, outcome.value)


def _compare(
    line: list[str], run: Callable[..., RecordedRun], notes: list[str]
) -> tuple[RecordedRun, RecordedRun, tuple[Outcome, str]]:
    """Runs trainings until there is a verdict: the host's, ours, and yardsticks, which show what
    rounding does.

    The host's undistributed optimizer is a yardstick, because it adds up in another order. If it
    cannot run or adds up in the same order, the host runs again with a learning rate that differs
    by rounding.
    """
    hosts, plain = line, without(line, DISTRIBUTED)
    try:
        own = run("host's own", hosts, Switch.OFF)
    except HostError as error:
        if plain == line:
            raise
        notes.append(
            "The host's distributed optimizer did not run, so its undistributed one is compared. "
            f"{error}"
        )
        hosts = plain
        try:
            own = run("host's own, undistributed", hosts, Switch.OFF)
        except HostError as second:
            raise HostError(f"{error}\n{second}") from second
    ours_line = line if plain != line else plus(line, "--use-distributed-optimizer")
    ours = run("ours", ours_line, Switch.REQUIRE)
    verdict, yardsticks = judge(own, ours), list[RecordedRun]()
    if not any(each.apart for each in differences(own, ours)):
        return own, ours, verdict
    undistributed = {"the host's undistributed one": plain} if hosts != plain else {}
    by_rounding = {"the one with a learning rate that differs by rounding": hosts}
    for name, words in (undistributed | by_rounding).items():
        try:  # the state of the undistributed one may not fit into memory
            other = run(name, words, Switch.OFF, _NUDGE if name in by_rounding else 0.0)
        except HostError as error:
            notes.append(str(error))
            continue
        notes.append(f"The host's own run and {name}: {apart_text(differences(own, other))}.")
        if name in undistributed and exceeds_bounds(own, other, TIMES):
            continue  # the next yardstick tells whether that is noise or another optimizer
        yardsticks.append(other)
        verdict = judge(own, ours, *yardsticks)
        # no yardstick can explain what rounding in no training explains
        if verdict[0] is Outcome.SAME or exceeds_bounds(own, ours):
            break
    if not yardsticks:
        text = (
            "No verdict: the host did not run a second time, which would show what rounding does."
        )
        verdict = Outcome.NONE, text
    return own, ours, verdict


def _figures(run: RecordedRun) -> dict[str, list[Any]]:
    times = [1e3 * (after - before) for before, after in pairwise(run.values("started"))]
    memory = [each["memory"] / (1 << 30) for each in run.steps[-1]]
    return {what: run.values(what) for what in _VALUES} | {_TIMES: times, _MEMORY: memory}


def _tables(figures: _Figures, found: Sequence[Deviation]) -> list[Any]:
    """A line for each iteration, then one number of each run."""
    apart = {
        (each.iteration, each.what): f"{each.apart:.1e}" if each.apart else "0" for each in found
    }
    cells = [["iteration", "loss", "ours", *(f"{what} apart" for what in _SHOWN), "ms", "ours"]]
    for number in range(found[-1].iteration):
        losses = [f"{run['loss'][number]:.6f}" for run in figures.values()]
        apart_there = [apart[number + 1, what] for what in _SHOWN]
        times = []
        for run in figures.values():  # the last iteration has no end
            of_run = run[_TIMES]
            times.append(f"{of_run[number]:.0f}" if number < len(of_run) else "-")
        cells.append([f"{number + 1}", *losses, *apart_there, *times])
    totals = {
        "milliseconds, median": [f"{median(run[_TIMES] or [0.0]):.0f}" for run in figures.values()],
        "peak memory of a rank, GiB": [f"{max(run[_MEMORY]):.2f}" for run in figures.values()],
        "skipped steps": [f"{sum(run['skipped']):g}" for run in figures.values()],
    }
    return [
        rows(cells),
        rows([["", *figures], *([name, *values] for name, values in totals.items())]),
    ]


def _picture(figures: _Figures, found: Sequence[Deviation]) -> bytes:
    """Draws losses, differences, milliseconds and memory as PNG; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9, 5), layout="constrained")
    panels: dict[str, dict[str, list[Any]]] = {
        title: {name: run[title] for name, run in figures.items()}
        for title in ("loss", _TIMES, _MEMORY)
    }
    panels[_APART] = {what: [] for what in _SHOWN}
    for each in found:
        if each.what in _SHOWN:  # a difference of 0 cannot be drawn on a logarithmic scale
            panels[_APART][each.what].append(each.apart or math.nan)
    for panel, (title, lines) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        first = 0 if title == _MEMORY else 1  # ranks count from 0
        for style, (name, values) in zip(("-", "--", ":"), lines.items(), strict=False):
            numbers = range(first, first + len(values))
            panel.plot(numbers, values, style, marker=".", label=name)
        panel.set(title=title, yscale="log" if title == _APART else "linear")
        if title in (_TIMES, _MEMORY):
            panel.set_ylim(bottom=0)
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        panel.legend()
    file = BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()
