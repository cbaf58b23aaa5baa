"""One checkpoint through both kinds of hosts: a fork of 2023 saves, megatron-core takes it over and
saves, the fork goes on from that.

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
from megatron_distopt.hosts.megatron.naming import canonical
from megatron_distopt.layout import Span
from tests.support.cases import Case
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.long

SAVED_AT, ITERATIONS = 2, 4
#: The GPT of tests/support/gpt.py, as the fork's flags say it.
MODEL = (
    *(
        "--num-layers",
        "2",
        "--hidden-size",
        "40",
        "--num-attention-heads",
        "4",
        "--vocab-size",
        "128",
    ),
    *("--seq-length", "16", "--max-position-embeddings", "16"),
)
AT_SAVE = f"iter_{SAVED_AT:07d}"
#: In the folder of all: what the fork saved, what megatron-core saved of it, and from where the
#: fork goes on.
SAVED, TAKEN_OVER = f"saved/{AT_SAVE}/distrib_optim.distopt", "by megatron-core"
BACK = f"back/{AT_SAVE}/distrib_optim.distopt"


# In the ranks of the fork.


def _train(folder: str, name: str, *words: str) -> list[float]:
    from tests.support.mini_fork import MiniFork

    fork = MiniFork.imported(file_layout="gathered", adam="fused")
    flags = ("--use-distributed-optimizer", "--bf16", *MODEL, "--train-iters", str(ITERATIONS))
    with contextlib.redirect_stdout(io.StringIO()):
        return fork.train(*flags, *words, "--save", f"{folder}/{name}").losses


def _fork_saves(rank: int, size: int, folder: str) -> list[float]:
    return _train(folder, "saved", "--save-interval", str(SAVED_AT))


def _fork_goes_on(rank: int, size: int, folder: str) -> list[float]:
    """From its own files, but with the optimizer state that megatron-core wrote."""
    return _train(folder, "end", "--load", f"{folder}/back")


# In the ranks of megatron-core.


def _core_takes_over(rank: int, size: int, folder: Path) -> list[str]:
    """Collective, at another layout: the params that are not what the saved state rounds to."""
    from tests.support import gpt

    with contextlib.closing(
        gpt.Training(Case("distopt", precision="bf16", tp=2, dp=size // 2))
    ) as training:
        training.optimizer.load(folder / SAVED)
        training.optimizer.save(folder / TAKEN_OVER)
        return _params_that_differ(training, open_checkpoint(folder / SAVED))


def _params_that_differ(training: Any, source: Source) -> list[str]:
    from megatron_distopt.hosts.megatron_core.model_parallel import whole_model_of

    model = whole_model_of(training.optimizer.chained_optimizers)
    keys, differs = _keys(source), []
    for share, optimizer in zip(model.shares, training.optimizer.chained_optimizers, strict=True):
        for name, param in optimizer.named.items():
            placement = share.placements[name]
            whole = source.read(keys["main", placement.name])
            for piece in placement.pieces(Span(0, param.numel())):
                here = (
                    param.detach()
                    .view(-1)[piece.in_param.as_slice()]
                    .view(piece.sizes)[piece.inside.as_slices()]
                )
                if not torch.equal(here, whole[piece.in_global.as_slices()].to(param.dtype)):
                    differs.append(name)
    return differs


# In the test process.


def _keys(source: Source) -> Mapping[tuple[str, str], str]:
    """Keys by kind and the name that both hosts share."""
    return {(kind_of(key), canonical(name_of(key))): key for key in source.tensors}


@dataclasses.dataclass(frozen=True)
class Found:
    """What all of them left, by rank."""

    folder: Path
    uninterrupted: list[list[float]]
    differ: list[list[str]]
    back: list[list[float]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("across")
    uninterrupted = run_ranks(_fork_saves, 2, str(folder))
    differ = run_ranks(_core_takes_over, 4, folder, core=True)
    shutil.copytree(folder / "saved" / AT_SAVE, folder / "back" / AT_SAVE)
    (folder / "back" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    shutil.rmtree(folder / BACK)
    shutil.copytree(folder / TAKEN_OVER, folder / BACK)
    return Found(folder, uninterrupted, differ, run_ranks(_fork_goes_on, 2, str(folder)))


def test_load_when_a_fork_saved_then_megatron_core_has_every_param(found: Found) -> None:
    assert found.differ == [[]] * 4


def test_save_when_another_host_takes_it_over_then_no_bit_of_it_is_changed(found: Found) -> None:
    before, after = (
        open_checkpoint(found.folder / SAVED),
        open_checkpoint(found.folder / TAKEN_OVER),
    )
    assert _keys(before).keys() == _keys(after).keys()
    assert len(_keys(before)) == 3 * 28, "not a main param and two moments of every param"
    for shared, key in _keys(before).items():
        assert torch.equal(before.read(key), after.read(_keys(after)[shared])), key
    assert {group.step for group in after.head.groups} == {SAVED_AT}
    assert {group.options["lr"] for group in after.head.groups} == {
        group.options["lr"] for group in before.head.groups
    }


def test_resume_when_the_state_went_through_another_host_then_it_is_the_uninterrupted_run(
    found: Found,
) -> None:
    assert len(found.back[0]) == ITERATIONS - SAVED_AT
    assert found.back[0] == found.uninterrupted[0][SAVED_AT:]
