"""Checkpoints of a Megatron of 2023 that cross tensor-parallel sizes and precisions; see tests/support/crossed.py.

One spawn of two ranks.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.checkpoint.test_precision_resume import PRECISIONS
from tests.hosts.test_megatron_2023_reshard import (
    SAVED_AT,
    Layout,
    Saved,
    _folder_in,
    _Fork,
    _load_across,
    _Reader,
    _replaced,
    _saved_at,
)
from tests.hosts.test_state_precision import asked_for
from tests.support.crossed import PAIRS, SAVED, Found, Loaded, Pair, check_losses, check_values, compare
from tests.support.mini_fork import core_folder
from tests.support.spawn import run_ranks


def resume_2023(rank: int, size: int, folder: str) -> Found:
    """Collective."""
    fork = _Fork(rank, folder)
    saved = {}
    for name, tp in SAVED:
        with asked_for(PRECISIONS[name]):
            run = fork.train_and_save(f"{name} {tp}", *_words(tp))
        saved[name, tp] = run.losses[SAVED_AT:]
    return saved, {pair: _resume_2023(fork, pair) for pair in PAIRS}


def _words(tp: int) -> tuple[str, ...]:
    layout = Layout(dp=2 // tp, tp=tp)
    return Saved(layout, is_exact=False, batch=4).flags(layout)


def _resume_2023(fork: _Fork, pair: Pair) -> Loaded:
    from megatron_distopt.hosts.megatron_2023.checkpoint import whole_model_of

    folder, compared = fork.folder / pair.folder, list[Loaded]()
    source = _Reader(_folder_in(_saved_at(folder))).source
    look = fork.first(lambda optimizer: compared.append(compare(whole_model_of(optimizer), source)))
    with look, _replaced(fork.fork.training, load_checkpoint=_load_across), asked_for(PRECISIONS[pair.loaded]):
        run = fork.train(*_words(pair.other_tp), "--load", str(folder))
    return dataclasses.replace(compared[0], losses=run.losses)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    core_folder()
    return run_ranks(resume_2023, 2, str(tmp_path_factory.mktemp("crossed")), seconds=300)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_load_when_precision_and_tensor_parallel_size_differ_then_values_are_those_saved_as_the_new_one_rounds_them(
    found: list[Found], pair: Pair
) -> None:
    check_values(found, pair)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_resume_when_precision_and_tensor_parallel_size_differ_then_training_goes_on(
    found: list[Found], pair: Pair
) -> None:
    check_losses(found[:1], pair)  # of the rank that logs
