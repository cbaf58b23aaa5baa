"""How `plan` shows what it worked out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_distopt.layout.estimate import Footprint, Kind
from megatron_distopt.plugin.commands.plan_choice import AUTO, Choice, ChoicePlan, StagePlan
from megatron_distopt.plugin.commands.plan_model import GptSizes
from megatron_distopt.plugin.commands.plan_timeline import Assumed, Times
from megatron_distopt.plugin.commands.show import Column, counted, facts, number_text, ranges, size_text, table

if TYPE_CHECKING:
    from megatron_distopt.plugin.commands.plan import BuiltRank, Planned, Row

__all__ = ["lines", "name_of", "time_text"]

_KINDS = ("params", "grads", "main", "moments")
#: By column: what need not be said where all choices have it.
_USUAL = {"ep": "1", "wire": "none", "bucket": "all", "stage": "0"}
#: Sizes of buckets that are no number, in a sentence.
_BUCKETS = {_USUAL["bucket"]: "one bucket", AUTO: "buckets as runs choose them"}


def lines(planned: Planned, width: int | None) -> list[str]:
    """For people.

    Args:
        planned: all that is told.
        width: of the terminal in characters; None for any.
    """
    parts = [
        ["model", *facts(_model(planned.gpt), width)],
        ["assumed", *facts(_assumed(planned.assumed), width)],
        ["choices; bytes of a rank of the fullest stage, between two steps", *_choices(planned.rows, width)],
    ]
    if len(planned.rows) == 1:
        parts += _details(planned.rows[0], width)
    parts += [[_built_heading(each), *facts(_built(each), width)] for each in planned.built]
    return [line for part in parts for line in [*part, ""]][:-1]


def time_text(seconds: float) -> str:
    """
    >>> time_text(0), time_text(0.0000125), time_text(0.25), time_text(12.345)
    ('0', '12.5 us', '250 ms', '12.3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0"


def name_of(plan: ChoicePlan) -> str:
    """A choice in one line."""
    choice = plan.choice
    sizes = [f"dp {choice.cut.dp}", f"tp {choice.cut.tp}", f"pp {choice.cut.pp}"]
    sizes += [f"ep {choice.cut.ep}"] * (choice.cut.ep > 1)
    sent = "" if choice.reduce_dtype is None else f" sent as {choice.reduce_dtype}"
    bucket = _BUCKETS.get(_bucket(choice), f"buckets of {_bucket(choice)}")
    return ", ".join([*sizes, f"{choice.dtype} with {choice.grad_dtype} grads{sent}", bucket])


def _bucket(choice: Choice) -> str:
    """As it is written on the command line, with commas."""
    if choice.bucket_size is None:
        return _USUAL["bucket"]
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


def _choices(rows: Sequence[Row], width: int | None) -> list[str]:
    titles = ("dp", "tp", "pp", "ep", "dtype", "grads", "wire", "bucket", "stage")
    columns = [Column(title) for title in titles]
    columns += [Column(title, is_optional=True) for title in _KINDS]
    columns += [Column("all"), Column("not sharded", is_optional=True), Column("buckets", is_optional=True)]
    columns += [Column("collectives", is_optional=True), Column("sent"), Column("takes", is_optional=True)]
    columns += [Column("hidden", is_optional=True), Column("exposed")]
    cells = [_choice_cells(row) for row in rows]
    for number, title in enumerate(titles):
        if all(row[number] == _USUAL.get(title) for row in cells):
            for row in cells:
                row[number] = ""
    return table(columns, cells, width)


def _choice_cells(row: Row) -> list[str]:
    choice, stage, times = row.plan.choice, row.plan.fullest, row.times
    exposed, hidden = times.exposed_seconds, times.hidden_seconds
    return [
        *(str(size) for size in (choice.cut.dp, choice.cut.tp, choice.cut.pp, choice.cut.ep)),
        *(choice.dtype, choice.grad_dtype, choice.reduce_dtype or _USUAL["wire"], _bucket(choice)),
        ranges(row.plan.stage_numbers(stage)),
        *_bytes(stage.footprint),
        size_text(_unsharded_nbytes(stage.footprint)),
        *(str(stage.num_buckets), str(len(stage.collectives)), size_text(stage.sent_nbytes)),
        time_text(times.seconds),
        "" if hidden is None else time_text(hidden),
        "" if exposed is None else time_text(exposed),
    ]


def _bytes(held: Footprint) -> list[str]:
    kinds = (held.param_nbytes, held.grad_nbytes, held.main_nbytes, held.moment_nbytes, held.lasting_nbytes)
    return [size_text(nbytes) for nbytes in kinds]


def _unsharded_nbytes(held: Footprint) -> int:
    """Of a rank that updates all its params itself."""
    return held.param_nbytes + held.grad_nbytes + held.undistributed_nbytes


def _details(row: Row, width: int | None) -> Iterator[list[str]]:
    columns = [Column("stages"), Column("tensors", is_optional=True), Column("elements", is_optional=True)]
    columns += [Column(title, is_optional=True) for title in _KINDS]
    columns += [Column("all"), Column("buckets"), Column("sent")]
    cells = [_stage_cells(row.plan, stage) for stage in row.plan.stages]
    yield ["pipeline stages", *table(columns, cells, width)]
    yield ["one step of the fullest stage", *facts(_step(row.plan.fullest, row.times), width)]


def _stage_cells(plan: ChoicePlan, stage: StagePlan) -> list[str]:
    numbers = [ranges(plan.stage_numbers(stage)), f"{len(stage.params):,}", f"{stage.numel:,}"]
    return [*numbers, *_bytes(stage.footprint), str(stage.num_buckets), size_text(stage.sent_nbytes)]


def _step(stage: StagePlan, times: Times) -> Iterator[tuple[str, str]]:
    shown = times.timeline
    scattered = None if shown is None else shown.exposed_scatter_seconds
    gathered = None if shown is None else shown.exposed_gather_seconds
    for kind, took, exposed, by in (
        (Kind.REDUCE_SCATTER, times.scatter_seconds, scattered, "backward"),
        (Kind.ALL_GATHER, times.gather_seconds, gathered, "the next forward"),
        (Kind.ALL_REDUCE, times.stats_seconds, None, "nothing"),
    ):
        yield kind.value, _collectives_text(stage, kind, took, exposed, by)
    held = stage.footprint
    yield "for a moment", f"{size_text(held.backward_nbytes)} in backward: the largest gradient, before it is added up"
    if held.step_nbytes:
        yield "for a step", f"{size_text(held.step_nbytes)}: fp32 copies of the gradients that the rank owns"
    yield "updated", f"{counted(held.num_runs, 'flat tensor')} by the inner optimizer"


def _collectives_text(stage: StagePlan, kind: Kind, seconds: float, exposed: float | None, by: str) -> str:
    sent = [each.sent_nbytes for _, each in stage.collectives if each.kind is kind]
    if not sent:
        return "none"
    text = f"{len(sent):,} that send {size_text(sum(sent))} in {time_text(seconds)}"
    if exposed is None:
        return text
    hidden = max(seconds - exposed, 0.0)
    return f"{text}; {by} can hide {time_text(hidden)} ({100 * hidden / seconds:.0f}%)"


def _built_heading(each: BuiltRank) -> str:
    cut = each.plan.choice.cut
    stage, rank = cut.place_of(each.rank)
    where = f"stage {stage}, data-parallel rank {rank} of {cut.dp}"
    return f"built without memory: rank {each.rank} of {cut.num_ranks:,} ({where})"


def _built(each: BuiltRank) -> Iterator[tuple[str, str]]:
    built, held, cut = each.built, each.plan.footprint, each.plan.choice.cut
    yield "groups", f"torch's fake process group of {counted(cut.num_ranks, 'rank')}, data-parallel ones of {cut.dp:,}"
    updated = f"the inner optimizer updates {counted(built.num_runs, 'flat tensor')}"
    yield "tensors", f"{counted(built.num_params, 'param')} of {built.numel:,} elements; {updated}"
    for kind in ("param", "grad", "main", "moment"):
        found, planned = getattr(built, f"{kind}_nbytes"), getattr(held, f"{kind}_nbytes")
        said = "as planned" if found == planned else f"planned were {planned:,}"
        yield f"{kind} bytes", f"{found:,}: {said}"
    seconds = built.seconds
    steps = {"groups": seconds.groups, "params": seconds.params, "layout": seconds.layout}
    steps |= {"buffers and optimizer": seconds.optimizer, "first update": seconds.update}
    text = ", ".join(f"{name} {time_text(each)}" for name, each in steps.items())
    yield "time", f"{time_text(seconds.total)}: {text}"
    yield "memory", f"the peak of this process rose by {size_text(built.process_nbytes)}"
