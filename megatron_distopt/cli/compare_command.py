"""`megatron-distopt compare`: the user's own training with the host's optimizer and with ours, and
a verdict."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
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
    plus,
    train,
    with_runner,
    without,
)
from megatron_distopt.cli.compare_verdict import Deviation, apart_text, differences, judge
from megatron_distopt.cli.show import Answer, rows
from megatron_distopt.config import Switch
from megatron_distopt.errors import HostError
from megatron_distopt.hosts.recording import RecordedRun

_SHOWN, _VALUES = ("loss", "gradient norm", "weights"), ("loss", "norm", "loss_scale", "skipped")
_TIMES, _MEMORY, _APART = "milliseconds an iteration", "peak memory by rank, GiB", "apart, relative"
# by run and what is shown; by iteration or by rank
_Figures = Mapping[str, Mapping[str, list[Any]]]


def answer(parsed: argparse.Namespace) -> Answer:
    """Runs the launch line with the host's optimizer and with ours, and compares."""
    line = without(
        with_runner(parsed.launch), WRITING if parsed.keep_load else f"{WRITING}|{LOADING}"
    )
    line = plus(line, "--exit-interval", str(parsed.iterations))
    plain, notes = without(line, DISTRIBUTED), list[str]()
    has_both = has_flag = plain != line
    parsed.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="distopt-compare-") as scratch:
        run = partial(train, Path(scratch), parsed.iterations)
        try:
            own = run("host's own", line, Switch.OFF)
        except HostError as error:
            if not has_flag:
                raise
            notes.append(
                "The host's undistributed optimizer is compared. "
                f"{str(error).partition(' Try ')[0]}"
            )
            own, has_both = run("host's own", plain, Switch.OFF), False
        ours = run(
            "ours", line if has_flag else plus(line, "--use-distributed-optimizer"), Switch.REQUIRE
        )
        (is_same, sentence), found = judge(own, ours), differences(own, ours)
        if any(each.apart for each in found) and (is_same or has_both):
            name, seed = (
                ("the host's undistributed one", ())
                if has_both
                else ("another seed", ("--seed", "8191"))
            )
            try:  # the state of the undistributed one may not fit into memory
                other = run(name, plus(plain, *seed), Switch.OFF)
                notes.append(f"The host's own and {name}: {apart_text(differences(own, other))}.")
                is_same, sentence = judge(own, ours, other) if has_both else (is_same, sentence)
            except HostError as error:
                notes.append(str(error))
    figures = {"host's own": _figures(own), "ours": _figures(ours)}
    document = {
        "is_same": is_same,
        "verdict": sentence,
        "notes": [*notes],
        "launch": line,
        "runs": figures,
    }
    document["apart"] = [asdict(each) for each in found]
    files, unfinished = (
        {"compare.json": Answer(document, ()).as_json().encode()},
        parsed.output / f".{os.getpid()}",
    )
    try:
        files["compare.png"] = _picture(figures, found)
    except ImportError:
        notes.append("For a picture: pip install matplotlib")
    for name, content in files.items():  # each as a whole or not at all
        unfinished.write_bytes(content)
        unfinished.replace(parsed.output / name)
    notes.append(f"Written: {', '.join(str(parsed.output / name) for name in files)}.")
    return Answer(document, [*_tables(figures, found), *map(Text, (*notes, sentence))], not is_same)


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
        times = [
            "".join(f"{each:.0f}" for each in run[_TIMES][number:][:1]) or "-"
            for run in figures.values()
        ]
        cells.append(
            [f"{number + 1}", *losses, *(apart[number + 1, what] for what in _SHOWN), *times]
        )
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
    apart = {what: [each.apart or None for each in found if each.what == what] for what in _SHOWN}
    panels = {
        title: {name: run[title] for name, run in figures.items()}
        for title in ("loss", _TIMES, _MEMORY)
    }
    for panel, (title, lines) in zip(
        figure.subplots(2, 2).flat, (panels | {_APART: apart}).items(), strict=True
    ):
        for (name, values), style in zip(lines.items(), ("-", "--", ":"), strict=False):
            numbers = range(len(values)) if title == _MEMORY else range(1, len(values) + 1)
            panel.plot(numbers, values, style, marker=".", label=name)
        from_zero = (
            (0, 1.3 * max(map(max, lines.values()))) if title in (_TIMES, _MEMORY) else (None, None)
        )
        panel.set(title=title, yscale="log" if title == _APART else "linear", ylim=from_zero)
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        panel.legend()
    figure.savefig(file := BytesIO(), format="png", dpi=90)
    return file.getvalue()
