"""Programs at random."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st

from tests.differential.idioms import IDIOMS, Place, Refusable
from tests.differential.programs import Action, Iteration, Microbatch, Phase, Program, allowed
from tests.differential.scripts import GROUPS, OPTIMIZERS, SCHEDULERS, ZERO

_KINDS = (
    "Perceptron",
    "Tied",
    "OwnParams",
    "Branching",
    "Normed",
    "Convolution",
    "PartlyFrozen",
    "Recurrent",
)
_KINDS += ("WeightNormed", "Strided", "Hollow")
#: Modules that torch computes in fp16 on every CPU.
_IN_FP16 = ("Perceptron", "Tied", "OwnParams", "Branching", "PartlyFrozen")
_NUMBERS = st.integers(0, 7)
#: Draws of one hypothesis test resemble each other, so many tests draw a few each.
_DRAWN_TOGETHER = 10


def draw(number: int, start: int) -> list[Program]:
    """Programs at random, the same for the same start."""
    drawn: list[Program] = []

    @settings(
        max_examples=_DRAWN_TOGETHER,
        database=None,
        phases=[Stage.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def collect(program: Program) -> None:
        drawn.append(program)

    while len(drawn) < number:
        seed(start + len(drawn))(collect)()
    return drawn[:number]


def _sometimes(one_in: int) -> st.SearchStrategy[bool]:
    """Shrinks to False."""
    return st.integers(0, one_in - 1).map(lambda number: number == one_in - 1)


def _seldom(values: tuple[Any, ...], one_in: int) -> st.SearchStrategy[Any]:
    """None, or one of the values. Shrinks to None."""
    return st.integers(0, one_in * len(values) - 1).map(
        lambda number: (
            values[number - (one_in - 1) * len(values)]
            if number >= (one_in - 1) * len(values)
            else None
        )
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Every program means something; a quarter of them does what an error of ours may answer."""
    daring = draw(_sometimes(4))
    program = draw(_frames(daring))
    start = draw(_actions(program, Place.START, daring))
    ready = draw(_actions(program, Place.READY, daring))
    phases = tuple(
        dataclasses.replace(phase, iterations=draw(_iterations(program, daring)))
        for phase in program.phases
    )
    drawn = dataclasses.replace(program, start=start, ready=ready, phases=phases)
    leaves_out = any(each.step == "not on one rank" for each in drawn.iterations)
    return _simple(drawn) if leaves_out else drawn


def _simple(program: Program) -> Program:
    """Without what else is collective, or differs by rank: how far ranks are apart shows in the
    next step."""
    simple = (
        dataclasses.replace(each, weights=(), grads=(), after=(), zero="optimizer")
        for each in program.phases[0].iterations
    )
    phase = dataclasses.replace(program.phases[0], iterations=tuple(simple))
    return dataclasses.replace(program, start=(), ready=(), phases=(phase,))


@st.composite
def _frames(draw: st.DrawFn, daring: bool) -> Program:
    """A program of which only the iterations and actions are missing."""
    kind = draw(st.sampled_from(_KINDS))
    dtypes = ("float32", "float32", "bfloat16", "mixed") + (
        ("float16",) if kind in _IN_FP16 else ()
    )
    dtype = draw(st.sampled_from(dtypes))
    sizes = st.sampled_from((2, 3, 1, 4, 2))
    groups = draw(st.sampled_from(tuple(GROUPS)))
    optimizer = draw(st.sampled_from(tuple(OPTIMIZERS)))
    # of 16-bit params the reference has copies of the groups, which it writes anew
    if optimizer == "Counting":
        dtype = "float32"
    num_phases = st.sampled_from((1, 1, 1, 2))
    phases = [Phase(draw(sizes)) for _ in range(draw(num_phases))]
    scheduler = draw(_seldom(tuple(SCHEDULERS), 3))
    return Program(
        kind=kind,
        dtype=dtype,
        optimizer=optimizer,
        groups=groups,
        scheduler=scheduler,
        scheduler_before=scheduler is not None and draw(_sometimes(4)),
        options=draw(_options(dtype, optimizer)),
        compiled=draw(_seldom(("before", "after", "method"), 6)),
        recompute=draw(_seldom(("reentrant", "not reentrant"), 5)),
        grad_scaler=daring and dtype != "float16" and draw(_sometimes(6)),
        other_seeds=draw(_sometimes(5)),
        phases=tuple(phases),
    )


@st.composite
def _options(draw: st.DrawFn, dtype: str, optimizer: str) -> tuple[tuple[str, Any], ...]:
    # Going uphill (maximize) makes of the rounding of a 16-bit gradient another curve within ten
    # steps.
    may_round = dtype != "float32" and optimizer != "Adam amsgrad"
    drawn: dict[str, Any] = {
        "overlap_grad_reduce": draw(_sometimes(3)) or None,
        "overlap_param_gather": draw(_sometimes(3)) or None,
        "bucket_size": draw(_seldom((16, 64, 200), 2)),
        "clip_grad": draw(_seldom((0.25,), 4)),
        "nonfinite": draw(_seldom(("skip",), 4)),
        "shared_memory": draw(_seldom((False,), 4)),
        "async_save": draw(_sometimes(6)) or None,
        "reduce_dtype": draw(_seldom(("bfloat16",), 12)) if dtype == "float32" else None,
        "grads_in_fp32": draw(_seldom((False,), 3)) if may_round else None,
        # Without a loss scale fp16 is refused at the start.
        "loss_scale": draw(
            st.sampled_from((8.0, "dynamic"))
            if dtype == "float16"
            else _seldom((8.0, "dynamic"), 8)
        ),
    }
    if drawn["loss_scale"] == "dynamic":
        drawn |= {
            "initial_loss_scale": 64.0,
            "growth_interval": 2,
            "hysteresis": draw(st.sampled_from((1, 2))),
        }
    return tuple((name, value) for name, value in drawn.items() if value is not None)


def _iterations(program: Program, daring: bool) -> st.SearchStrategy[tuple[Iteration, ...]]:
    longest = 4 if len(program.phases) > 1 else 7
    return st.lists(_iteration(program, daring), min_size=2, max_size=longest).map(tuple)


@st.composite
def _iteration(draw: st.DrawFn, program: Program, daring: bool) -> Iteration:
    steps = ("plain",) * 5 + ("none",) * (daring or not program.option.get("overlap_grad_reduce"))
    scaled = program.option.get("loss_scale") and not daring
    steps += () if program.grad_scaler else ("closure",)
    steps += () if program.grad_scaler or scaled else ("twice",)
    steps += ("not on one rank",) if daring else ()
    zeros = [
        name
        for name in ZERO
        if not (scaled and name in ("kept", "zero_ of each", "model, not to None"))
    ]
    return Iteration(
        weights=draw(_actions(program, Place.WEIGHTS, daring)),
        microbatches=tuple(draw(st.lists(_microbatch(program, daring), min_size=1, max_size=3))),
        no_sync=not (
            (daring or not program.option.get("overlap_grad_reduce")) and draw(_sometimes(4))
        ),
        grads=draw(_actions(program, Place.GRADS, daring)),
        step=draw(st.sampled_from(steps)),
        after=draw(_actions(program, Place.AFTER, daring)),
        zero=draw(st.sampled_from(zeros)),
    )


@st.composite
def _microbatch(draw: st.DrawFn, program: Program, daring: bool) -> Microbatch:
    copes = (
        program.option.get("nonfinite") == "skip" or program.option.get("loss_scale") == "dynamic"
    )
    return Microbatch(
        entry=draw(st.sampled_from(("model", "model", "model", "forward", "loss"))),
        # A GradScaler that has scaled nothing fails by itself.
        idle=None if program.grad_scaler else draw(_seldom((0, 1), 6)),
        infinite=draw(_seldom((0, 1), 8)) if copes or (daring and draw(_sometimes(8))) else None,
        is_scaled=not (daring and bool(program.option.get("loss_scale")) and draw(_sometimes(8))),
    )


def _actions(program: Program, place: Place, daring: bool) -> st.SearchStrategy[tuple[Action, ...]]:
    """Mostly none: a program should not be all exceptions."""
    usable = [name for name in IDIOMS if allowed(name, program, place)]
    if not daring:
        usable = [name for name in usable if _is_promised(name, program)]
    if not usable:
        return st.just(())
    action = st.builds(Action, st.sampled_from(usable), _NUMBERS)
    return st.one_of(st.just(()), st.just(()), st.lists(action, min_size=1, max_size=2).map(tuple))


def _is_promised(name: str, program: Program) -> bool:
    """Whether only the right result will do."""
    several = max(phase.ranks for phase in program.phases) > 1
    return {
        Refusable.NEVER: True,
        Refusable.ALWAYS: False,
        Refusable.SEVERAL_RANKS: not several,
        Refusable.OVERLAP: not program.option.get("overlap_grad_reduce"),
    }[IDIOMS[name].refusable]
