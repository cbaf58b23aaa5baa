"""One checkpoint through both kinds of hosts: a fork of 2023 saves, megatron-core takes it over and saves, the fork
goes on from that.

The two hosts have packages of the same name, so each has a spawn of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt.checkpoint.manifest import kind_of, name_of
from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.hosts.naming import canonical
from megatron_distopt.layout import Span
from tests.support.cases import Case
from tests.support.mini_fork import TrainingRun
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.long

SAVED_AT, ITERATIONS = 2, 4
#: The GPT of tests/support/gpt.py, as the fork's flags say it.
MODEL = (
    *("--num-layers", "2", "--hidden-size", "40", "--num-attention-heads", "4", "--vocab-size", "128"),
    *("--seq-length", "16", "--max-position-embeddings", "16"),
)
PRECISIONS: dict[str, tuple[str, ...]] = {"fp32": (), "bf16": ("--bf16",)}


def _iteration(folder: Path) -> Path:
    return folder / f"iter_{SAVED_AT:07d}"


def _state_in(iteration: Path) -> Path:
    return iteration / "distrib_optim.distopt"


def _taken_over(folder: Path, precision: str) -> Path:
    """What megatron-core saved of it."""
    return folder / f"{precision} by megatron-core"


# In the ranks of the fork.


def _train(folder: Path, precision: str, name: str, *words: str) -> TrainingRun:
    from tests.support.mini_fork import MiniFork

    fork = MiniFork.imported(file_layout="gathered", adam="fused")
    flags = ("--use-distributed-optimizer", *PRECISIONS[precision], *MODEL, "--train-iters", str(ITERATIONS))
    with contextlib.redirect_stdout(io.StringIO()):
        return fork.train(*flags, *words, "--save", str(folder / name))


def _fork_saves(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    return {
        precision: _train(Path(folder), precision, precision, "--save-interval", str(SAVED_AT)).losses
        for precision in PRECISIONS
    }


def _fork_goes_on(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    """From its own files, but with the optimizer state that megatron-core wrote."""
    return {
        precision: _train(
            Path(folder), precision, f"{precision} end", "--load", str(Path(folder) / f"{precision} back")
        ).losses
        for precision in PRECISIONS
    }


# In the ranks of megatron-core.


def _core_takes_over(rank: int, size: int, folder: str) -> dict[str, list[str]]:
    """Collective, at another layout: the params that are not what the saved state rounds to."""
    from tests.support import gpt

    found = {}
    for precision in PRECISIONS:
        case = Case("distopt", precision=precision, tp=2, dp=size // 2)
        with contextlib.closing(gpt.Training(case)) as training:
            source = open_checkpoint(_state_in(_iteration(Path(folder) / precision)))
            training.optimizer.load(_state_in(_iteration(Path(folder) / precision)))
            found[precision] = _params_that_differ(training, source)
            training.optimizer.save(_taken_over(Path(folder), precision))
    return found


def _params_that_differ(training: Any, source: Source) -> list[str]:
    from megatron_distopt.hosts.megatron_core.model_parallel import whole_model_of

    model = whole_model_of(training.optimizer.chained_optimizers)
    keys, differs = _keys(source), []
    for share, optimizer in zip(model.shares, training.optimizer.chained_optimizers, strict=True):
        for name, param in optimizer.named.items():
            placement = share.placements[name]
            whole = source.read(keys["main", placement.name])
            for piece in placement.pieces(Span(0, param.numel())):
                here = param.detach().view(-1)[piece.in_param.as_slice()].view(piece.sizes)[piece.inside.as_slices()]
                if not torch.equal(here, whole[piece.in_global.as_slices()].to(param.dtype)):
                    differs.append(name)
    return differs


# In the test process.


def _keys(source: Source) -> Mapping[tuple[str, str], str]:
    """Keys by kind and the name that both hosts share."""
    return {(kind_of(key), canonical(name_of(key))): key for key in source.tensors}


@dataclasses.dataclass(frozen=True)
class Found:
    """What all of them left."""

    folder: Path
    uninterrupted: list[dict[str, list[float]]]
    core: list[dict[str, list[str]]]
    back: list[dict[str, list[float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("across")
    uninterrupted = run_ranks(_fork_saves, 2, str(folder))
    core = run_ranks(_core_takes_over, 4, str(folder), core=True)
    for precision in PRECISIONS:
        back = folder / f"{precision} back"
        shutil.copytree(_iteration(folder / precision), _iteration(back))
        (back / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
        shutil.rmtree(_state_in(_iteration(back)))
        shutil.copytree(_taken_over(folder, precision), _state_in(_iteration(back)))
    return Found(folder, uninterrupted, core, run_ranks(_fork_goes_on, 2, str(folder)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_load_when_a_fork_saved_then_megatron_core_has_every_param(precision: str, found: Found) -> None:
    assert [each[precision] for each in found.core] == [[]] * 4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_save_when_another_host_takes_it_over_then_no_bit_of_it_is_changed(precision: str, found: Found) -> None:
    before = open_checkpoint(_state_in(_iteration(found.folder / precision)))
    after = open_checkpoint(_taken_over(found.folder, precision))
    assert _keys(before).keys() == _keys(after).keys()
    assert len(_keys(before)) == 3 * 28, "not a main param and two moments of every param"
    for shared, key in _keys(before).items():
        assert torch.equal(before.read(key), after.read(_keys(after)[shared])), key
    assert {group.step for group in after.head.groups} == {SAVED_AT}
    assert {group.options["lr"] for group in after.head.groups} == {group.options["lr"] for group in before.head.groups}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_when_the_state_went_through_another_host_then_it_is_the_uninterrupted_run(
    precision: str, found: Found
) -> None:
    without, back = found.uninterrupted[0][precision], found.back[0][precision]
    assert len(back) == ITERATIONS - SAVED_AT
    assert back == without[SAVED_AT:]
