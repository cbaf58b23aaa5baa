"""The tables of `megatron-distopt plan`: a row for each choice, and one for each combination that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import RenderableType

from megatron_distopt.cli.plan_choice import ChoicePlan, StagePlan
from megatron_distopt.cli.plan_fit import Fit
from megatron_distopt.cli.plan_model import TP_MODES, Choice
from megatron_distopt.cli.plan_times import Times
from megatron_distopt.cli.show import Column, ColumnTable, counted, ranges, rows, size_text, time_text

Row = TypeVar("Row")


@dataclass(frozen=True)
class PlanRow:
    """A choice with its times."""

    plan: ChoicePlan
    times: Times

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks hold most."""
        return self.plan.fullest


def bucket_text(choice: Choice) -> str:
    """Returns the bucket size as on the command line, with commas."""
    if choice.bucket_size is None:
        return "all"
    return choice.bucket_size if isinstance(choice.bucket_size, str) else f"{choice.bucket_size:,}"


def _of_choice(choice_of: Callable[[Row], Choice]) -> tuple[Column[Row], ...]:
    """The columns of parallel sizes and of the dtypes of buffers."""
    return (
        Column("dp", lambda row: str(choice_of(row).cut.dp)),
        Column("tp", lambda row: str(choice_of(row).cut.tp)),
        Column("pp", lambda row: str(choice_of(row).cut.pp)),
        Column("ep", lambda row: str(choice_of(row).cut.ep), usual="1"),
        Column("dtype", lambda row: choice_of(row).dtype),
        Column("grads", lambda row: choice_of(row).grad_dtype),
        Column("optimizer", lambda row: choice_of(row).optimizer, usual="adam", is_text=True),
        Column("muon tp mode", lambda row: choice_of(row).muon_tp_mode, usual=TP_MODES[0], is_text=True),
    )


def _bucket(choice_of: Callable[[Row], Choice]) -> Column[Row]:
    return Column("bucket", lambda row: bucket_text(choice_of(row)), usual="all")


def _bytes(title: str, nbytes_of: Callable[[StagePlan], int], *, is_optional: bool = True) -> Column[PlanRow]:
    return Column(title, lambda row: size_text(nbytes_of(row.fullest)), is_optional=is_optional)


def _unsharded_nbytes(stage: StagePlan) -> int:
    """Returns the bytes of a rank that updates all its params itself."""
    held = stage.footprint
    return held.param_nbytes + held.grad_nbytes + held.undistributed_nbytes


def _on_host_nbytes(stage: StagePlan) -> int:
    return stage.footprint.host_nbytes + stage.footprint.staging_nbytes


_CHOICES: tuple[Column[PlanRow], ...] = (
    *_of_choice(lambda row: row.plan.choice),
    Column("state", lambda row: row.plan.choice.state or "float32", usual="float32"),
    Column("on host", lambda row: f"{row.plan.choice.offload_fraction:g}", usual="0"),
    Column("reduce dtype", lambda row: row.plan.choice.reduce_dtype or "none", usual="none"),
    _bucket(lambda row: row.plan.choice),
    Column("stage", lambda row: ranges(row.plan.stage_numbers(row.fullest)), usual="0"),
    _bytes("params", lambda stage: stage.footprint.param_nbytes),
    _bytes("grads", lambda stage: stage.footprint.grad_nbytes),
    _bytes("main", lambda stage: stage.footprint.main_nbytes),
    _bytes("moments", lambda stage: stage.footprint.moment_nbytes),
    Column("host", lambda row: size_text(_on_host_nbytes(row.fullest)), usual="0 B"),
    _bytes("all", lambda stage: stage.footprint.lasting_nbytes, is_optional=False),
    _bytes("not sharded", _unsharded_nbytes),
    Column("buckets", lambda row: str(row.fullest.num_buckets), is_optional=True),
    Column("collectives", lambda row: str(len(row.fullest.collectives)), is_optional=True),
    _bytes("sent", lambda stage: stage.sent_nbytes, is_optional=False),
    Column("takes", lambda row: time_text(row.times.seconds), is_optional=True),
    Column("hidden", lambda row: time_text(row.times.hidden_seconds), is_optional=True),
    Column("exposed", lambda row: time_text(row.times.exposed_seconds)),
    Column("update", lambda row: time_text(row.times.update.seconds), is_optional=True),
)


def table_of_choices(chosen: Sequence[PlanRow]) -> RenderableType:
    """A row for each choice."""
    return ColumnTable(_CHOICES, chosen)


def _moments_text(choice: Choice) -> str:
    forms = dict.fromkeys((choice.exp_avg_dtype, choice.exp_avg_sq_dtype))
    return ", ".join(forms)


#: What a fit is for. The table of choices has them as well, so columns with one value in all rows are left out.
_SIZES: tuple[Column[Fit], ...] = (*_of_choice(lambda fit: fit.plan.choice), _bucket(lambda fit: fit.plan.choice))
_FITS: tuple[Column[Fit], ...] = (
    Column("main", lambda fit: fit.plan.choice.main_params_dtype, is_text=True),
    Column("moments", lambda fit: _moments_text(fit.plan.choice), is_text=True),
    Column("on host", lambda fit: f"{fit.plan.choice.offload_fraction:g}", usual="0"),
    Column("what changes", lambda fit: fit.change.value, is_optional=True, is_text=True),
    Column("device", lambda fit: size_text(fit.plan.peak_nbytes)),
    Column("left", lambda fit: size_text(fit.left_nbytes), is_optional=True),
    Column("update", lambda fit: time_text(fit.update.seconds)),
    Column("moves", lambda fit: size_text(fit.moved_nbytes), is_optional=True),
    Column("host of a node", lambda fit: size_text(fit.host_nbytes), usual="0 B", is_optional=True),
    Column("down", lambda fit: size_text(fit.copied_nbytes[0]), usual="0 B", is_optional=True),
    Column("up", lambda fit: size_text(fit.copied_nbytes[1]), usual="0 B", is_optional=True),
)


def described_fits(fits: Sequence[Fit]) -> Iterator[RenderableType]:
    """Lists what fits, for people, and sums up what does not."""
    fitting = [fit for fit in fits if not fit.lacking_nbytes]
    if fitting:
        sizes = [column for column in _SIZES if len(set(map(column.cell, fits))) > 1]
        yield ColumnTable((*sizes, *_FITS), fitting)
    yield rows(_notes(fits, fitting))


def _notes(fits: Sequence[Fit], fitting: Sequence[Fit]) -> Iterator[tuple[str, str]]:
    if fitting:
        more = "" if fitting[0].machine.reserve_nbytes else "; --reserve GIB keeps so much free"
        yield "left", f"for activations and everything else that is not planned{more}"
        yield "first row", f"{fitting[0].options or 'no option'} in a run"
    if any(fit.plan.choice.offload_fraction and fit.plan.choice.bucket_size is None for fit in fitting):
        yield "buckets", "one bucket a buffer is on the host as a whole; --bucket-size auto moves only what has to go"
    others = [fit for fit in fits if fit.lacking_nbytes]
    if others:
        nearest = min(others, key=lambda fit: fit.lacking_nbytes)
        yield "left out", f"{counted(len(others), 'combination')}, {_lack_text(nearest)}"
    if not fitting:
        yield "to fit", _remedy(fits)


def _remedy(fits: Sequence[Fit]) -> str:
    """What to write where nothing fits."""
    smallest = min(fits, key=lambda fit: fit.without_state_nbytes)
    remedies = ["larger --tp or --pp"]
    if smallest.without_state_nbytes <= smallest.left_nbytes + smallest.plan.peak_nbytes:
        remedies.insert(0, "a larger --dp, which makes a rank's part of the state smaller")
        remedies += ["a larger --host-memory"] * any(fit.host_left_nbytes < 0 for fit in fits)
        return f"write {', or '.join(remedies)}"
    remedies += ["--grad-dtype param"] * any(fit.plan.choice.grad_dtype != fit.plan.choice.dtype for fit in fits)
    alone = f"params and grads alone take {size_text(smallest.without_state_nbytes)}"
    return f"{alone}: write {', or '.join(remedies)}"


def _lack_text(fit: Fit) -> str:
    """Says what the nearest of the combinations that do not fit lacks."""
    lacking = {"device": -fit.left_nbytes, "host": -fit.host_left_nbytes}
    named = [f"{size_text(nbytes)} on the {place}" for place, nbytes in lacking.items() if nbytes > 0]
    return f"of which the nearest lacks {' and '.join(named)}"
