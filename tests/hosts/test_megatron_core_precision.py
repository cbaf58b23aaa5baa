"""Checkpoints of megatron-core that cross tensor-parallel sizes and precisions; see tests/support/crossed.py.

One spawn of two ranks.
"""

from __future__ import annotations

import dataclasses

import pytest

from megatron_distopt.checkpoint.source import open_checkpoint
from megatron_distopt.optimizer.low_precision.state_precision import Precision
from tests.checkpoint.test_precision_resume import PRECISIONS
from tests.hosts.test_megatron_core_checkpoints import BF16, MORE_STEPS, STEPS, Run, _Bench, _model_of, pytestmark
from tests.support.crossed import PAIRS, SAVED, Found, Loaded, Pair, check_losses, check_values, compare
from tests.support.spawn import run_ranks

__all__ = ["pytestmark"]


def resume_core(rank: int, size: int, folder: str) -> Found:
    """Collective."""
    bench, saved = _Bench(rank, folder), {}
    for name, tp in SAVED:
        with bench.training(_run(PRECISIONS[name], tp)) as training:
            for _ in range(STEPS):
                training.step()
            training.optimizer.save(bench.folder / f"{name} {tp}")
            saved[name, tp] = [training.step().loss for _ in range(MORE_STEPS)]
    return saved, {pair: _resume_core(bench, pair) for pair in PAIRS}


def _run(precision: Precision, tp: int) -> Run:
    options = tuple((name.upper(), value) for name, value in vars(precision).items())
    return BF16.at(tp=tp, dp=2 // tp, of_options=options)


def _resume_core(bench: _Bench, pair: Pair) -> Loaded:
    with bench.training(_run(PRECISIONS[pair.loaded], pair.other_tp)) as training:
        training.optimizer.load(bench.folder / pair.folder)
        source = open_checkpoint(bench.folder / pair.folder)
        loaded = compare(_model_of(training), source)
        bench.begin_at(training, STEPS)
        return dataclasses.replace(loaded, losses=[training.step().loss for _ in range(MORE_STEPS)])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(resume_core, 2, str(tmp_path_factory.mktemp("crossed")), seconds=300)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_load_when_precision_and_tensor_parallel_size_differ_then_values_are_those_saved_as_the_new_one_rounds_them(
    found: list[Found], pair: Pair
) -> None:
    check_values(found, pair)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_resume_when_precision_and_tensor_parallel_size_differ_then_training_goes_on(
    found: list[Found], pair: Pair
) -> None:
    check_losses(found, pair)
