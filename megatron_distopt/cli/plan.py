"""`megatron-distopt plan`: what parallel sizes, dtypes and buckets cost, before anything is started.

Imports no torch, but where a rank is to be built. Its command line is in `plan_arguments`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table

from megatron_distopt.cli.plan_arguments import assumed_of, choices_of, sizes_of
from megatron_distopt.cli.plan_choice import (
    Assumed,
    ChoicePlan,
    Interval,
    StagePlan,
    Timeline,
    TimelineLane,
    Times,
    plan_choice,
    plan_stage,
    times_of,
)
from megatron_distopt.cli.plan_model import AUTO, Choice, GptSizes
from megatron_distopt.cli.show import Answer, counted, number_text, ranges, rows, size_text, time_text, titled
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout.estimate import Kind

if TYPE_CHECKING:
    from megatron_distopt.cli.plan_build import Built

__all__ = ["answer"]


def answer(parsed: argparse.Namespace) -> Answer:
    """Plans every choice; needs torch only where a rank is to be built.

    Raises:
        ConfigError: sizes that do not fit together, or a plot that cannot be drawn.
    """
    gpt = sizes_of(parsed)
    assumed = assumed_of(parsed, gpt)
    plans = [plan_choice(gpt, choice) for choice in choices_of(parsed)]
    times = [times_of(plan.fullest, assumed) for plan in plans]
    if parsed.plot:
        _check_drawable(times)
    built = [] if parsed.rank is None else [_build(gpt, plan.choice, parsed.rank) for plan in plans]
    if parsed.plot:
        titles = map(_title, plans, times)
        _draw([(title, each.timeline) for title, each in zip(titles, times, strict=True) if each.timeline], parsed.plot)
    document = {
        "model": {**asdict(gpt), "ffn_width": gpt.ffn_width},
        "assumed": asdict(assumed),
        "choices": [*map(_choice_document, plans, times)],
        "built": [
            {"rank": parsed.rank, "planned": asdict(plan.footprint), "built": asdict(each)} for plan, each in built
        ],
    }
    parts: list[RenderableType] = [
        titled("model", rows(_model(gpt))),
        titled("assumed", rows(_assumed(assumed))),
        titled("choices; bytes of a rank of the fullest stage, between two steps", _ChoiceTable(plans, times)),
    ]
    if len(plans) == 1:
        parts.append(titled("pipeline stages", rows(_stage_row(plans[0], stage) for stage in plans[0].stages)))
        parts.append(titled("one step of the fullest stage", rows(_step(plans[0].fullest, times[0]))))
    parts += [_builder().described(parsed.rank, plan, each) for plan, each in built]
    return Answer(document, parts)


def _check_drawable(times: Sequence[Times]) -> None:
    timelines = [each.timeline for each in times if each.timeline is not None]
    if not timelines:
        rule, remedy = "have the length of backward", "Write --backward-ms MS or --tokens-per-second N as well"
        raise ConfigError(refusal("--plot", "no time of backward", rule, remedy))
    if not any(timeline.intervals for timeline in timelines):
        rule, remedy = "have something to draw", "Write a --backward-ms above 0"
        raise ConfigError(refusal("--plot", "a step that takes no time", rule, remedy))


def _title(plan: ChoicePlan, times: Times) -> str:
    """Describes a choice and its times in one line."""
    choice = plan.choice
    sizes = [f"dp {choice.cut.dp}", f"tp {choice.cut.tp}", f"pp {choice.cut.pp}"]
    sizes += [f"ep {choice.cut.ep}"] * (choice.cut.ep > 1)
    sent = "" if choice.reduce_dtype is None else f" sent as {choice.reduce_dtype}"
    bucket = {"all": "one bucket", AUTO: "buckets as runs choose them"}
    sizes += [f"{choice.dtype} with {choice.grad_dtype} grads{sent}"]
    sizes += [choice.state] * bool(choice.state)
    sizes += [bucket.get(_bucket(choice), f"buckets of {_bucket(choice)}")]
    exposed = time_text(times.exposed_seconds or 0.0)
    return f"{', '.join(sizes)}: {exposed} of {time_text(times.seconds)} of communication exposed"


def _build(gpt: GptSizes, choice: Choice, rank: int) -> tuple[StagePlan, Built]:
    """Returns the plan of one rank, and the measurements of what was built."""
    cut = choice.cut
    if rank >= cut.num_ranks:
        rule = f"be below the {cut.num_ranks} ranks of dp {cut.dp}, tp {cut.tp} and pp {cut.pp}"
        raise ConfigError(refusal("--rank", rank, rule, "Write --rank 0 for the first one"))
    plan = plan_stage(gpt, choice, *cut.place_of(rank))
    return plan, _builder().build(plan, rank)


def _builder() -> ModuleType:
    """Imports what needs torch."""
    return import_module("megatron_distopt.cli.plan_build")


def _choice_document(plan: ChoicePlan, times: Times) -> dict[str, Any]:
    choice = plan.choice
    return {
        **asdict(choice.cut),
        "ranks": choice.cut.num_ranks,
        "dtype": choice.dtype,
        "grad_dtype": choice.grad_dtype,
        "reduce_dtype": choice.reduce_dtype,
        "main_params_dtype": choice.main_params_dtype,
        "exp_avg_dtype": choice.exp_avg_dtype,
        "exp_avg_sq_dtype": choice.exp_avg_sq_dtype,
        "bucket_size": choice.bucket_size,
        "stages": [_stage_document(plan, stage) for stage in plan.stages],
        "fullest_stage": plan.fullest.stage,
        "seconds": {
            "reduce_scatter": times.scatter_seconds,
            "all_gather": times.gather_seconds,
            "all_reduce": times.stats_seconds,
            "exposed": times.exposed_seconds,
        },
        "timeline": None if times.timeline is None else asdict(times.timeline),
    }


def _stage_document(plan: ChoicePlan, stage: StagePlan) -> dict[str, Any]:
    sent = {kind: stage.sent_by(kind) for kind in Kind}
    return {
        "stages": list(plan.stage_numbers(stage)),
        "params": len(stage.params),
        "numel": stage.numel,
        "buckets": stage.num_buckets,
        "bytes": {**asdict(stage.footprint), "lasting_nbytes": stage.footprint.lasting_nbytes},
        "collectives": {kind.value: {"count": len(each), "sent_nbytes": sum(each)} for kind, each in sent.items()},
        "sent_nbytes": stage.sent_nbytes,
    }


def _bucket(choice: Choice) -> str:
    """Returns the bucket size as on the command line, with commas."""
    if choice.bucket_size is None:
        return "all"
    return choice.bucket_size if isinstance(choice.bucket_size, str) else f"{choice.bucket_size:,}"


def _model(gpt: GptSizes) -> Iterator[tuple[str, str]]:
    heads = "" if gpt.heads is None else f", {counted(gpt.heads, 'head')}"
    kv_heads = "" if gpt.kv_heads is None else f" with {gpt.kv_heads} of keys and values"
    yield "gpt", f"{counted(gpt.layers, 'layer')}, hidden {gpt.hidden:,}{heads}{kv_heads}"
    gated = "gated " if gpt.is_gated else ""
    experts = f"{counted(gpt.experts, 'expert')} of {gpt.expert_ffn or gpt.ffn_width:,}, {gpt.top_k} a token"
    yield "mlp", f"{gated}{experts if gpt.experts else f'{gpt.ffn_width:,}'}"
    padded = f", padded to a multiple of {gpt.vocab_multiple} times tp" if gpt.vocab_multiple else ""
    yield "vocabulary", f"{gpt.vocab:,}{padded}; {'tied' if gpt.is_tied else 'untied'}"
    positions = f"{gpt.num_positions:,} learned positions" if gpt.num_positions else "no learned positions"
    biases = "biases" if gpt.has_bias else "biases of queries, keys and values" if gpt.has_qkv_bias else "no biases"
    yield "the rest", f"{positions}, {biases}, {'RMSNorm' if gpt.is_rms else 'LayerNorm'}"


def _assumed(assumed: Assumed) -> Iterator[tuple[str, str]]:
    gigabits = number_text(assumed.bytes_per_second * 8 / 1e9)
    yield "link", f"{gigabits} Gbit/s a rank, and {time_text(assumed.hop_seconds)} a message"
    if assumed.backward_seconds is None:
        yield "backward", "unknown: --backward-ms or --tokens-per-second says what can be hidden"
    else:
        times = time_text(assumed.backward_seconds), time_text(assumed.backward_seconds / 2)
        yield "backward", f"{times[0]} a microbatch, forward {times[1]}, update {time_text(assumed.update_seconds)}"


@dataclass(frozen=True)
class _Column:
    """One column of the table of choices.

    Args:
        title: its heading.
        cell: its text for one choice.
        usual: the text that needs no column where all choices have it.
        is_optional: whether it is left out where the table would be too wide.
    """

    title: str
    cell: Callable[[ChoicePlan, Times], str]
    usual: str = ""
    is_optional: bool = False


def _column_of_bytes(title: str, nbytes_of: Callable[[StagePlan], int], *, is_optional: bool = True) -> _Column:
    return _Column(title, lambda plan, times: size_text(nbytes_of(plan.fullest)), is_optional=is_optional)


def _unsharded_nbytes(stage: StagePlan) -> int:
    """Returns the bytes of a rank that updates all its params itself."""
    held = stage.footprint
    return held.param_nbytes + held.grad_nbytes + held.undistributed_nbytes


_COLUMNS = (
    _Column("dp", lambda plan, times: str(plan.choice.cut.dp)),
    _Column("tp", lambda plan, times: str(plan.choice.cut.tp)),
    _Column("pp", lambda plan, times: str(plan.choice.cut.pp)),
    _Column("ep", lambda plan, times: str(plan.choice.cut.ep), usual="1"),
    _Column("dtype", lambda plan, times: plan.choice.dtype),
    _Column("grads", lambda plan, times: plan.choice.grad_dtype),
    _Column("state", lambda plan, times: plan.choice.state or "float32", usual="float32"),
    _Column("reduce dtype", lambda plan, times: plan.choice.reduce_dtype or "none", usual="none"),
    _Column("bucket", lambda plan, times: _bucket(plan.choice), usual="all"),
    _Column("stage", lambda plan, times: ranges(plan.stage_numbers(plan.fullest)), usual="0"),
    _column_of_bytes("params", lambda stage: stage.footprint.param_nbytes),
    _column_of_bytes("grads", lambda stage: stage.footprint.grad_nbytes),
    _column_of_bytes("main", lambda stage: stage.footprint.main_nbytes),
    _column_of_bytes("moments", lambda stage: stage.footprint.moment_nbytes),
    _column_of_bytes("all", lambda stage: stage.footprint.lasting_nbytes, is_optional=False),
    _column_of_bytes("not sharded", _unsharded_nbytes),
    _Column("buckets", lambda plan, times: str(plan.fullest.num_buckets), is_optional=True),
    _Column("collectives", lambda plan, times: str(len(plan.fullest.collectives)), is_optional=True),
    _column_of_bytes("sent", lambda stage: stage.sent_nbytes, is_optional=False),
    _Column("takes", lambda plan, times: time_text(times.seconds), is_optional=True),
    _Column("hidden", lambda plan, times: time_text(times.hidden_seconds), is_optional=True),
    _Column("exposed", lambda plan, times: time_text(times.exposed_seconds)),
)


@dataclass(frozen=True)
class _ChoiceTable:
    """A row for each choice. Where it is too wide, optional columns are left out, the last one first."""

    plans: Sequence[ChoicePlan]
    times: Sequence[Times]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [column for column in _COLUMNS if not {"", column.usual}.issuperset(self._cells(column))]
        optional = [column for column in columns if column.is_optional]
        unlimited = options.update(width=100_000)
        while optional and console.measure(self._drawn(columns), options=unlimited).maximum > options.max_width:
            columns.remove(optional.pop())
        yield self._drawn(columns)

    def _cells(self, column: _Column) -> list[str]:
        return [*map(column.cell, self.plans, self.times)]

    def _drawn(self, columns: Sequence[_Column]) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for row in zip(*map(self._cells, columns), strict=True):
            table.add_row(*row)
        return Padding(table, (0, 0, 0, 2), expand=False)


def _stage_row(plan: ChoicePlan, stage: StagePlan) -> tuple[str, str]:
    held = stage.footprint
    said = [
        counted(len(stage.params), "tensor"),
        counted(stage.numel, "element"),
        f"params {size_text(held.param_nbytes)}",
        f"grads {size_text(held.grad_nbytes)}",
        f"main {size_text(held.main_nbytes)}",
        f"moments {size_text(held.moment_nbytes)}",
        f"all {size_text(held.lasting_nbytes)}",
        counted(stage.num_buckets, "bucket"),
        f"sent {size_text(stage.sent_nbytes)}",
    ]
    return ranges(plan.stage_numbers(stage)), ", ".join(said)


def _step(stage: StagePlan, times: Times) -> Iterator[tuple[str, str]]:
    shown = times.timeline
    scattered = None if shown is None else shown.exposed_scatter_seconds
    gathered = None if shown is None else shown.exposed_gather_seconds
    for kind, took, exposed, by in (
        (Kind.REDUCE_SCATTER, times.scatter_seconds, scattered, "backward"),
        (Kind.ALL_GATHER, times.gather_seconds, gathered, "the next forward"),
        (Kind.ALL_REDUCE, times.stats_seconds, None, "nothing"),
    ):
        yield kind.value, _collectives_text(stage.sent_by(kind), took, exposed, by)
    held = stage.footprint
    yield "for a moment", f"{size_text(held.backward_nbytes)} in backward: the largest gradient, before it is added up"
    if held.step_nbytes:
        yield "for a step", f"{size_text(held.step_nbytes)}: fp32 copies of the gradients that the rank owns"
    yield "updated", f"{counted(held.num_flat_params, 'flat param')} by the inner optimizer"


def _collectives_text(sent: Sequence[int], seconds: float, exposed: float | None, by: str) -> str:
    if not sent:
        return "none"
    text = f"{len(sent):,} that send {size_text(sum(sent))} in {time_text(seconds)}"
    if exposed is None:
        return text
    hidden = max(seconds - exposed, 0.0)
    return f"{text}; {by} can hide {time_text(hidden)} ({100 * hidden / seconds:.0f}%)"


#: By the beginning of an interval's label. The colors differ in brightness, for prints without color.
_COLORS = {
    "backward": "#1f5f99",
    "update": "#6b4a8c",
    "forward": "#7fb2dd",
    "reduce-scatter": "#d9822b",
    "statistics": "#3a3a3a",
    "all-gather": "#f2c46d",
}
_WAITING = "#f3cfcb"
_HEIGHT = 0.8
_PLACE = {TimelineLane.COMPUTE: 1.0, TimelineLane.SEND: 0.0}


def _draw(titled: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draws one panel for each timeline, all with the same scale of time.

    Args:
        titled: title and timeline of each panel.
        path: of the picture; its ending says the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        rule, remedy = "have matplotlib to draw with", "Run pip install matplotlib"
        raise ConfigError(refusal("--plot", "matplotlib is not installed", rule, remedy))
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 1.2 + 1.5 * len(titled)), layout="constrained")
    panels = figure.subplots(len(titled), 1, squeeze=False, sharex=True)
    for (title, timeline), (axes,) in zip(titled, panels, strict=True):
        _panel(axes, title, timeline)
    timelines = [timeline for _, timeline in titled]
    longest = max(interval.stop for timeline in timelines for interval in timeline.intervals)
    panels[-1][0].set_xlim(0, 1.01e3 * longest)
    panels[-1][0].set_xlabel("ms from the beginning of the last microbatch's backward")
    _legend(figure, timelines)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        rule, remedy = "be a file that can be written, of a known format", "Write --plot plan.png"
        raise ConfigError(refusal("--plot", f"{path} ({error})", rule, remedy)) from None


def _panel(axes: Any, title: str, timeline: Timeline) -> None:
    for kind, color in _COLORS.items():
        for lane, place in _PLACE.items():
            shown = [each for each in timeline.intervals if each.lane is lane and each.label.startswith(kind)]
            spans = [(each.start * 1e3, (each.stop - each.start) * 1e3) for each in shown]
            axes.broken_barh(spans, (place - _HEIGHT / 2, _HEIGHT), facecolors=color, edgecolors="white", linewidth=0.4)
    waits = [(start * 1e3, (stop - start) * 1e3) for start, stop in _gaps(timeline.intervals)]
    axes.broken_barh(waits, (_PLACE[TimelineLane.COMPUTE] - _HEIGHT / 2, _HEIGHT), facecolors=_WAITING)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(list(_PLACE.values()), [lane.value for lane in _PLACE])
    axes.set_ylim(-0.6, 1.6)
    axes.spines[["top", "right"]].set_visible(False)


def _gaps(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Returns the gaps in which nothing is computed, from the first interval to the last."""
    busy = sorted((each.start, each.stop) for each in intervals if each.lane is TimelineLane.COMPUTE)
    ends = max((stop for _, stop in busy), default=0.0)
    gaps, free = [], 0.0
    for start, stop in [*busy, (ends, ends)]:
        gaps += [(free, start)] * (start > free + 1e-12)
        free = max(free, stop)
    return gaps


def _legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    patch = import_module("matplotlib.patches").Patch
    labels = {each.label for timeline in timelines for each in timeline.intervals if _is_visible(each, timeline)}
    kinds = [kind for kind in _COLORS if any(label.startswith(kind) for label in labels)]
    handles = [patch(facecolor=_COLORS[kind], label=kind) for kind in kinds]
    handles.append(patch(facecolor=_WAITING, label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _is_visible(interval: Interval, timeline: Timeline) -> bool:
    """Whether it is as wide as the line around it."""
    return interval.stop - interval.start > max(each.stop for each in timeline.intervals) / 1000
