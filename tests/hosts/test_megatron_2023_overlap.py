"""Communication overlapped with computation in a fork of 2023: the same bits as without, in the same buckets.

Every training runs with grads reduced after backward and params gathered before forward, and again with both
overlapped, some with the first alone. Gathers in the background are slow, so that a read that does not wait sees old
values.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_distopt.comm import Communicator, pairwise
from tests.support.mini_fork import InstalledFork, MiniFork, TrainingRun
from tests.support.spawn import run_ranks

DISTRIBUTED = "--use-distributed-optimizer"
#: The model has 7,744 elements.
BUCKETS = "--distopt-bucket-size 700"
# Not torch's fused kernel, which rounds the last elements of a run otherwise: buckets end where they end.
BASE = f"{DISTRIBUTED} --distopt-adam torch_foreach {BUCKETS} --lr 0.01 --train-iters 4"
AFTER = "--distopt-overlap-grad-reduce no"
OVERLAPPED = "--distopt-overlap-grad-reduce yes"
BOTH = f"{OVERLAPPED} --distopt-overlap-param-gather"

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FP16 = "--fp16 --initial-loss-scale 4096"
EXPERTS = "--experts --expert-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"

#: What is not long: the others run with scripts/test.sh -m long.
SHORT = (
    *("bf16", "fp16", "fp16 that overflows", "accumulation", "fp32 norms", "experts"),
    *("pp2", "tp2 sequence-parallel", "tp2", "bf16 with fp32 norms"),
)
#: On two ranks of an gathered file.
TWO = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": FP16,
    "fp16 that overflows": "--fp16 --initial-loss-scale 1e30",
    "accumulation": "--bf16 --global-batch-size 12",
    "untied": UNTIED,
    "fp32 norms": "--bf16 --fp32-norms",
    "frozen": "--bf16 --frozen-param",
    "ulysses": "--ds-sequence-parallel-size 2",
    "experts": f"--bf16 {EXPERTS}",
    "zeros counted": f"{UNTIED} --log-num-zeros-in-grad",
}
#: On four: what is added up over model-parallel ranks after backward, too.
FOUR = {
    "pp2": f"{PP2} --global-batch-size 12",
    "pp2 untied bf16": f"--bf16 {PP2} {UNTIED} --global-batch-size 12",
    "tp2 sequence-parallel": f"{TP2} --sequence-parallel",
    "tp2 sequence-parallel bf16": f"--bf16 {TP2} --sequence-parallel --global-batch-size 8",
    "multi-query sequence-parallel": f"{TP2} --multi-query --sequence-parallel",
    "tp2": f"{TP2} --bf16",
    "dp4 fp16": FP16,
    "experts": f"{EXPERTS} --bf16 --fp32-norms",
    "ulysses": "--bf16 --ds-sequence-parallel-size 2",
}


def _cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in names]


def _run(cases: Mapping[str, str], request: pytest.FixtureRequest) -> dict[str, str]:
    """Without those that are long where none of them is asked for."""
    leaves_long_out = request.config.option.markexpr == "not long"
    return {name: words for name, words in cases.items() if name in SHORT or not leaves_long_out}


#: Where the reduction of grads is overlapped alone, too: beside the bare model, for steps that are left out and for
#: buckets that wait; what else a case has takes the same way where params are gathered in the background as well.
REDUCED_ALONE = ("bf16", "fp16 that overflows", "pp2")


@dataclass(frozen=True)
class Found:
    """Of one case on one rank."""

    same: dict[str, bool]  # by what was overlapped, whether all bits, losses and norms are those of none of it
    early: list[int]  # by step, buckets that were under way when backward had ended
    buckets: int  # of the first buffer
    late: list[str]  # params in buckets of their own at the end of it


def _noting_early(early: list[int]) -> contextlib.AbstractContextManager[object]:
    original = Communicator.finish_grads

    def finish(self: Communicator) -> Any:
        if self.overlaps_grads:
            early.append(self.num_reducing)
        return original(self)

    return mock.patch.object(Communicator, "finish_grads", finish)


def _slowly(gather: Callable[..., None]) -> Callable[..., None]:
    def slow(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.005)
        gather(*args)

    return slow


def _frozen_after_wrapping(fork: MiniFork, chunks: Any) -> None:
    """What a fork's grad buffers have a place for, and no gradient comes of."""
    for name, param in chunks[0].named_parameters():
        param.requires_grad_("input_layernorm" not in name)


def _built_before(fork: MiniFork, chunks: Any) -> None:
    """An optimizer of which nothing is left but what it hooked."""
    fork.training.get_megatron_optimizer(chunks)


def _changed(fork: MiniFork, change: Callable[[MiniFork, Any], None]) -> contextlib.AbstractContextManager[object]:
    original = fork.training.get_model

    def get_model(*args: Any, **kwargs: Any) -> Any:
        chunks = original(*args, **kwargs)
        change(fork, chunks)
        return chunks

    return mock.patch.object(fork.training, "get_model", get_model)


#: What happens to the wrapped model before its optimizer is built.
CHANGES = {"frozen after wrapping": _frozen_after_wrapping, "had an optimizer before": _built_before}


def _same(one: TrainingRun, other: TrainingRun) -> bool:
    params = [torch.equal(param, other.params[name]) for name, param in one.params.items()]
    return all(params) and bool(params) and one.iterations == other.iterations


def _compare(fork: MiniFork, words: str, *, also_alone: bool = False) -> Found:
    early: list[int] = []
    without = fork.train(*f"{words} {BASE} {AFTER}".split())
    with _noting_early(early):
        both = fork.train(*f"{words} {BASE} {BOTH}".split())
    same = {"both": _same(both, without)}
    if also_alone:
        same["grads"] = _same(fork.train(*f"{words} {BASE} {OVERLAPPED}".split()), without)
    layout = both.optimizer.grad_buffers[0].plan.layout
    last = [slot.name for slot in layout.slots if slot.bucket == len(layout.buckets) - 1]
    return Found(same, early, len(layout.buckets), last)


#: No clipping: the norm is added up bucket by bucket, so other buckets round it elsewhere.
ONE = f"{DISTRIBUTED} --distopt-adam torch_foreach --lr 0.01 --clip-grad 1e9 {AFTER}"
MANY = f"{DISTRIBUTED} --distopt-adam torch_foreach --lr 0.01 --clip-grad 1e9 {BUCKETS} {BOTH}"


#: Who saved and who resumes; one bucket by one is what test_megatron_2023_checkpoints has of every model.
CROSSED = (("one", "many"), ("many", "one"), ("many", "many"), ("file", "many"), ("file", "one"))
GATHERED = "--distopt-checkpoint-format gathered"


def _files(fork: MiniFork, words: str, folder: Path) -> dict[tuple[str, str], bool]:
    """Trainings with one bucket and with many, saved after two steps and resumed by one another.

    Returns:
        By who saved and who resumed, whether two more steps end at the bits of four in a row.
    """
    chosen = {"one": f"{words} {ONE}", "many": f"{words} {MANY}", "file": f"{words} {ONE} {GATHERED}"}
    chosen = {kind: f"{each} --train-iters 4" for kind, each in chosen.items()}
    whole = fork.train(*chosen["one"].split())
    for saver, words_of_saver in chosen.items():
        fork.train(*f"{words_of_saver} --exit-interval 2 --save {folder / saver}".split())
    return {
        (saver, reader): _same_params(fork.train(*f"{chosen[reader]} --load {folder / saver}".split()), whole)
        for saver, reader in CROSSED
    }


def _same_params(one: TrainingRun, other: TrainingRun) -> bool:
    return all(torch.equal(param, other.params[name]) for name, param in one.params.items())


FILES = {"fp32": "", "bf16 with fp32 norms": "--bf16 --fp32-norms", "pp2": f"{PP2} --global-batch-size 4"}


def _collect(rank: int, size: int, cases: dict[str, str], files: dict[str, str], folder: Path) -> dict[str, Any]:
    fork = InstalledFork.imported(file_layout="gathered", adam="torch")
    pairwise.all_gather = _slowly(pairwise.all_gather)
    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Any] = {
            name: _compare(fork, words, also_alone=name in REDUCED_ALONE) for name, words in cases.items()
        }
        for name in CHANGES if size == 2 else ():
            with _changed(fork, CHANGES[name]):
                found[name] = _compare(fork, "--bf16")
        for name, words in files.items():
            found[f"files of {name}"] = _files(fork, words, folder / name.replace(" ", "_"))
        return found


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("files")
    return run_ranks(_collect, 2, _run(TWO, request), _run(FILES, request), folder, seconds=600.0)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_ranks(_collect, 4, _run(FOUR, request), {}, tmp_path_factory.mktemp("files"), seconds=600.0)


@pytest.mark.parametrize("name", _cases(FILES))
def test_checkpoint_when_buckets_change_then_training_goes_on_bit_for_bit(name: str, two: list[dict[str, Any]]) -> None:
    for each in two:
        assert each[f"files of {name}"] == dict.fromkeys(CROSSED, True)


@pytest.mark.parametrize("name", _cases(TWO))
def test_two_ranks_when_communication_is_hidden_then_every_bit_is_the_same_and_from_the_second_step_on_all_go_early(
    name: str, two: list[dict[str, Found]]
) -> None:
    for each in two:
        assert each[name].same == ({"both": True, "grads": True} if name in REDUCED_ALONE else {"both": True})
        assert each[name].early == [0, *[each[name].buckets] * 3]


@pytest.mark.parametrize("name", CHANGES)
def test_model_when_it_was_changed_after_wrapping_then_every_bit_is_the_same_and_all_buckets_go_early(
    name: str, two: list[dict[str, Found]]
) -> None:
    for each in two:
        assert each[name].same == {"both": True}
        assert each[name].early[-3:] == [each[name].buckets] * 3


@pytest.mark.parametrize("name", _cases(FOUR))
def test_four_ranks_when_communication_is_hidden_then_every_bit_is_the_same(
    name: str, four: list[dict[str, Found]]
) -> None:
    for each in four:
        assert each[name].same == ({"both": True, "grads": True} if name in REDUCED_ALONE else {"both": True})


@pytest.mark.parametrize(("name", "is_late"), [("pp2", True), ("tp2 sequence-parallel", True), ("tp2", False)])
def test_buckets_when_grads_are_added_up_after_backward_then_those_alone_wait(
    name: str, is_late: bool, four: list[dict[str, Found]]
) -> None:
    for each in four:
        early = each[name].early
        assert early[0] == 0
        assert all(0 < number < each[name].buckets if is_late else number == each[name].buckets for number in early[1:])


def test_params_when_the_host_adds_to_them_after_backward_then_they_have_buckets_of_their_own(
    four: list[dict[str, Found]],
) -> None:
    embeddings = {"language_model.embedding.word_embeddings.weight", "word_embeddings.weight"}
    assert {name for each in four for name in each["pp2"].late} == embeddings
    assert all("norm" in name or "bias" in name for each in four for name in each["tp2 sequence-parallel"].late)
