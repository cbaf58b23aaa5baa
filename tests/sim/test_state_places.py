"""Optimizer state in every precision and every place, in every kind of host, on the simulated accelerator.

On a CPU all state is on the host already, so a place is one only where there is a device. The same precision with all
of its state on the device is what every other place is compared with, to the bit. What is found is in the tables of
docs/precision.md, which scripts/precision_table.py writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from megatron_distopt.errors import DistOptError
from megatron_distopt.optimizer import sharded as sharded_module
from megatron_distopt.optimizer.precision import Precision
from tests.hosts.test_state_precision import ALL, FORMS, asked_for
from tests.sim import host_programs, programs
from tests.sim.trial import begin
from tests.support.sim import machine
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks
from tests.support.state_table import HOSTS, PARAMS, PRECISIONS, Row

#: Fractions of the state that are on the host, in the order of a cell.
PLACES = (0.5, 1.0)
#: By dtype of the params, programs of plain torch; a Megatron has them by the name of the dtype.
TORCH = {"bfloat16": "bf16 overlap", "float16": "fp16 dynamic", "float32": "fp32 overlap"}
OTHERS = ("float16", "float32")
EQUAL, REFUSED, ROUNDED = "equal", "refused", "rounded"
#: What is not long: by host, rows of the table.
SHORT: Mapping[str, tuple[Precision, ...]] = {
    "torch": (Precision("float16", "bfloat16", "bfloat16"),),
    "megatron_2023": (Precision("remainder", "float8_e5m2", "float8_e5m2"),),
    "megatron_core": (Precision("bfloat16", "float16", "float16"),),
}
#: Rows of the two tables.
ROWS = {(each.main_params_dtype, each.exp_avg_dtype): each for each in ALL}
PARAM_ROWS: tuple[Row, ...] = tuple(product(OTHERS, FORMS))
Cells = dict[Row, tuple[str, ...]]
Train = Callable[[str], Any]


def _trainer(host: str, rank: int, dtype: str = "bfloat16") -> Train:
    """By device: a training of some steps, with both overlaps."""
    if host == "torch":
        return lambda device: programs.train(TORCH[dtype], device, rank)
    return lambda device: host_programs.train("fork" if host == "megatron_2023" else "core", dtype, device)


@contextmanager
def _placed(fraction: float) -> Iterator[list[float]]:
    """In the block the environment asks for a place; yields the fractions of buckets that came to the host."""
    choose, chosen = sharded_module.buckets_on_host, list[float]()

    def noting(layouts: Sequence[Any], *args: Any) -> Any:
        found = choose(layouts, *args)
        chosen.append(sum(map(len, found)) / sum(len(layout.buckets) for layout, _ in layouts))
        return found

    with host_programs.variables({"OFFLOAD_FRACTION": str(fraction)}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_module, "buckets_on_host", noting)
        yield chosen


def _at(fraction: float, train: Train, seeds: Sequence[int], expected: Any) -> str:
    """What state in a place does: "equal", "refused", or what differs from `expected`."""
    with _placed(fraction) as chosen:
        found = [_compared(train, seed, expected, "offload_fraction") for seed in seeds]
    if set(found) != {EQUAL}:
        return "; ".join(dict.fromkeys(found))
    is_placed = all(each == 1.0 if fraction == 1.0 else 0.0 < each < 1.0 for each in chosen)
    return EQUAL if chosen and is_placed else f"{chosen} of the buckets"


def _compared(train: Train, seed: int, expected: Any, option: str) -> str:
    """What comes of a training on the device; "refused" is what a message about an option is."""
    machine.seed(seed)
    try:
        differs: str | None = train("sim").differs_from(expected)
    except DistOptError as error:
        return REFUSED if option in str(error) else str(error)
    return EQUAL if differs is None else f"seed {seed}: {differs}"


def compare_places(rank: int, size: int, host: str, rows: Sequence[Precision], seeds: Sequence[int]) -> Cells:
    """Collective: the parts of the cells for state on the host."""
    begin()
    take_over_world()
    train, found = _trainer(host, rank), Cells()
    for precision in rows:
        with asked_for(precision):
            machine.seed(0)
            on_device = train("sim")
            parts = tuple(_at(fraction, train, seeds, on_device) for fraction in PLACES)
            found[precision.main_params_dtype, precision.exp_avg_dtype] = parts
    return found


def compare_params(rank: int, size: int, host: str) -> Cells:
    """Collective: the cells of params of other dtypes than bf16; on the device compared with fp32 main params."""
    begin()
    take_over_world()
    found = Cells()
    for dtype in OTHERS:
        train = _trainer(host, rank, dtype)
        machine.seed(0)
        plain = train("sim")
        for form in FORMS:
            with asked_for(Precision(form)):
                found[dtype, form] = _cell(train, plain)
    return found


def _cell(train: Train, plain: Any) -> tuple[str, ...]:
    apart = _compared(train, 0, plain, "main_params_dtype")
    if apart == REFUSED:
        return (REFUSED,) * (1 + len(PLACES))
    machine.seed(0)
    on_device = train("sim")
    parts = [_at(fraction, train, (1,), on_device) for fraction in PLACES]
    return EQUAL if apart == EQUAL else ROUNDED, *parts


@pytest.mark.parametrize("host", HOSTS)
def test_state_when_a_fraction_is_on_the_host_then_training_is_as_the_table_says(host: str) -> None:
    table = PRECISIONS.read()
    for cells in run_ranks(compare_places, 2, host, SHORT[host], (1,), seconds=200):
        assert cells == {row: table[row][host][1:] for row in cells}
        assert {part for parts in cells.values() for part in parts} == {EQUAL}


def test_tables_when_read_then_they_have_every_combination_and_nothing_unexpected() -> None:
    precisions, params = PRECISIONS.read(), PARAMS.read()
    assert (tuple(precisions), tuple(params)) == (tuple(ROWS), PARAM_ROWS)
    parts = {part for cells in precisions.values() for cell in cells.values() for part in cell[1:]}
    parts |= {part for cells in params.values() for cell in cells.values() for part in cell}
    assert parts == {EQUAL, REFUSED, ROUNDED}
    assert {len(cell) for table in (precisions, params) for cells in table.values() for cell in cells.values()} == {3}


@pytest.mark.long
@pytest.mark.parametrize("host", HOSTS)
def test_state_when_in_every_precision_and_place_then_training_is_as_the_table_says(host: str) -> None:
    table = PRECISIONS.read()
    for cells in run_ranks(compare_places, 2, host, ALL, (1, 2), seconds=1800):
        assert cells == {row: table[row][host][1:] for row in ROWS}


@pytest.mark.long
@pytest.mark.parametrize("host", HOSTS)
def test_state_when_params_are_not_bf16_then_each_form_and_place_is_as_the_table_says(host: str) -> None:
    table = PARAMS.read()
    for cells in run_ranks(compare_params, 2, host, seconds=900):
        assert cells == {row: table[row][host] for row in PARAM_ROWS}
