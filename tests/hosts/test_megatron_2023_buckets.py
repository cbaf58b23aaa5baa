"""Files of trainings in one bucket and in many, each read by both.

Gathered files and ours; then per-rank files with the fork's one bucket, which the fork reads, and
with many, which are of ours: `convert` makes of the second what the first are.

Exercises hosts/megatron/own_shards.py, hosts/megatron_2023/buffers.py,
hosts/megatron_2023/checkpoint.py, hosts/megatron_2023/fork_files.py, hosts/megatron_2023/model.py.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_distopt.formats import convert
from tests.support.facts import Facts, facts_of
from tests.support.fork_worlds import Refused, refusal, slow_gathers
from tests.support.mini_fork import InstalledFork, MiniFork, TrainingRun, point_to
from tests.support.refusals import assert_mentions, raised
from tests.support.spawn import run_ranks
from tests.support.values import same

DISTRIBUTED = "--use-distributed-optimizer"
#: The model has 7,744 elements.
BUCKETS = "--distopt-bucket-size 700"
AFTER = "--distopt-overlap-grad-reduce no"
BOTH = "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather"

#: No clipping: the norm is added up bucket by bucket, so other buckets round it elsewhere.
ONE = f"{DISTRIBUTED} --distopt-adam torch_foreach --lr 0.01 --clip-grad 1e9 {AFTER}"
MANY = f"{DISTRIBUTED} --distopt-adam torch_foreach --lr 0.01 --clip-grad 1e9 {BUCKETS} {BOTH}"


#: Who saved and who resumes; one bucket by one is what test_megatron_2023_checkpoints has of every
#: model.
CROSSED = (("one", "many"), ("many", "one"), ("file", "many"))
GATHERED = "--distopt-checkpoint-format gathered"
MIXED = "--bf16 --fp32-norms"


def _saved(fork: MiniFork, words: str, folder: Path) -> TrainingRun:
    """Collective: three steps; the save after two of them is the one that is loaded."""
    run = fork.train(*f"{words} --train-iters 3 --save-interval 2 --save {folder}".split())
    point_to(folder, 2)
    return run


def _collect(rank: int, size: int, folder: Path) -> dict[tuple[str, str], bool]:
    """By who saved and who resumed, whether one more step ends at the bits of three in a row."""
    fork = InstalledFork.imported(file_layout="gathered", adam="torch")
    chosen = {
        "one": f"{MIXED} {ONE}",
        "many": f"{MIXED} {MANY}",
        "file": f"{MIXED} {ONE} {GATHERED}",
    }
    with contextlib.redirect_stdout(io.StringIO()), slow_gathers():
        runs = {kind: _saved(fork, words, folder / kind) for kind, words in chosen.items()}
        return {
            (saver, reader): same(
                fork.train(
                    *f"{chosen[reader]} --train-iters 3 --load {folder / saver}".split()
                ).params,
                runs["one"].params,
            )
            for saver, reader in CROSSED
        }


def test_checkpoint_when_buckets_change_then_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(_collect, 2, tmp_path, seconds=600.0) == [dict.fromkeys(CROSSED, True)] * 2


# Per-rank files. Those of three ranks are long: scripts/test.sh -m long.


@dataclass(frozen=True)
class Own:
    """A training whose state is kept in every rank's own file."""

    words: str
    bucket: int = 700  # elements, where there are many
    # parts of the names of the params that are; all where there are none
    trained: tuple[str, ...] = ()

    @property
    def of_fork(self) -> str:
        """Flags that the fork knows by itself. No clipping, as above."""
        return f"{DISTRIBUTED} --lr 0.01 --clip-grad 1e9 {self.words}"

    def kinds(self) -> dict[str, str]:
        ours = f"{self.of_fork} --distopt-adam torch_foreach"
        return {
            "one": f"{ours} {AFTER}",
            "many": f"{ours} --distopt-bucket-size {self.bucket} {BOTH}",
        }


OWN_OF_TWO = {MIXED: Own(MIXED)}
OF_THREE = "--global-batch-size 12"
GROUP_MISSING, NOTHING = "a group in some files alone", "ranks without anything"
TINY = "--hidden-size 2 --num-attention-heads 1 --num-layers 1 --micro-batch-size 1"
BIASES = ("layers.0.input_layernorm.bias", "layers.0.post_attention_layernorm.bias")
OWN_OF_THREE = {
    # Word embeddings fill the last file, which has nothing of the group without decay.
    GROUP_MISSING: Own(f"--bf16 --vocab-size 2048 --num-layers 1 {OF_THREE}"),
    # Two params of two elements: the files are of ranks 0 and 1, and the only bucket, of 66, is of
    # ranks 0 and 2.
    NOTHING: Own(f"--bf16 {TINY} {OF_THREE}", bucket=3, trained=BIASES),
}


@dataclass
class OwnFiles:
    """Of trainings with one bucket and with many, on one rank of a per-rank file."""

    facts: dict[str, bool] = field(default_factory=dict)  # what has to be true, by name
    # of the first buffer, by how many there are
    buckets: dict[str, int] = field(default_factory=dict)
    groups: int = 0  # how many this rank's file has
    owned: int = 0  # params of which this rank updates something, where there are many buckets
    refused: Refused | None = None  # on two ranks: a state that is wrong on rank 1 alone


def _training_only(
    fork: MiniFork, parts: tuple[str, ...]
) -> contextlib.AbstractContextManager[object]:
    """The model's other params are frozen."""
    provide = fork.script.model_provider

    def provider(*args: Any, **kwargs: Any) -> Any:
        model = provide(*args, **kwargs)
        for name, param in model.named_parameters():
            param.requires_grad_(not parts or any(part in name for part in parts))
        return model

    return mock.patch.object(fork.script, "model_provider", provider)


def _own_files(fork: MiniFork, own: Own, rank: int, size: int, folder: Path) -> OwnFiles:
    found = OwnFiles()
    runs = {}
    for kind, words in own.kinds().items():
        runs[kind] = _saved(fork, words, folder / kind)
        found.buckets[kind] = len(runs[kind].optimizer.fork.grad_buffers[0].plan.layout.buckets)
    if size == 2:  # sums over three ranks begin with another one where the owner is another
        found.facts["training"] = same(runs["one"].params, runs["many"].params)
        _converted(fork, own, rank, folder, found)
    found.groups = len(_own_file(folder / "one", rank)["optimizer"]["param_groups"])
    found.owned = sum(len(each.plan.shards) for each in runs["many"].optimizer.sharded.flat_params)
    _resumed(fork, own, size, folder, runs, found)
    if size == 2:
        found.refused = _refused(runs["many"], rank)
    return found


def _own_file(folder: Path, rank: int) -> Any:
    file = next(folder.glob(f"iter_0000002/mp_rank_*_{rank:03d}/optim.pt"))
    return torch.load(file, weights_only=True)["optimizer"]


def _resumed(
    fork: MiniFork,
    own: Own,
    size: int,
    folder: Path,
    runs: Mapping[str, TrainingRun],
    found: OwnFiles,
) -> None:
    for saver in runs:
        for reader, words in own.kinds().items():
            if size == 2 or saver == reader:
                again = fork.train(*f"{words} --train-iters 3 --load {folder / saver}".split())
                found.facts[f"{reader} resumes what {saver} saved"] = same(
                    again.params, runs[saver].params
                )


def _converted(fork: MiniFork, own: Own, rank: int, folder: Path, found: OwnFiles) -> None:
    """The fork's own optimizer, which keeps no update count in the same place, refuses our shards
    and takes its own."""
    words, files, theirs = f"{own.of_fork} --train-iters 3".split(), folder / "converted", []
    if rank == 0:
        convert(folder / "many" / "iter_0000002", files / "iter_0000002", "per-rank")
    point_to(files, 2)
    one, again = (_own_file(folder / kind, rank) for kind in ("one", "converted"))
    for key in ("optimizer", "shard_fp32_from_float16_groups"):
        found.facts[f"{key} of converted files"] = _same_values(again[key], one[key])
    for kind in ("one", "converted"):
        theirs.append(fork.train(*words, "--load", str(folder / kind), ours=False).params)
    found.facts["the fork's own resumes what was converted"] = same(*theirs)
    refused = raised(lambda: fork.train(*words, "--load", str(folder / "many"), ours=False))
    found.facts["the fork's own refuses what many saved"] = refused[0] != "nothing"


def _same_values(left: Any, right: Any) -> bool:
    """Options may be lists or tuples, and counts tensors or numbers."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            _same_values(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same_values, left, right))
    if isinstance(left, Tensor) and left.dim() == 1:
        return torch.equal(left, right)
    return bool(left == right)


def _refused(run: TrainingRun, rank: int) -> Refused:
    """On rank 1 alone a shard is missing."""
    state = copy.deepcopy(run.optimizer.state_dict())
    if rank == 1:
        shards = state["megatron_distopt"]["shards"]
        del shards[next(iter(shards))]
    return refusal(run, lambda: run.optimizer.load_state_dict(state))


def collect_facts(
    rank: int, size: int, adam: str, cases: dict[str, Own], folder: Path
) -> dict[str, OwnFiles]:
    fork = InstalledFork.imported(goes_back=True, file_layout="per_rank", adam=adam)
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for name, own in cases.items():
            with _training_only(fork, own.trained):
                found[name] = _own_files(fork, own, rank, size, folder / name.replace(" ", "_"))
    return found


facts = facts_of(collect_facts, 2, "torch", OWN_OF_TWO, seconds=600.0)


def test_own_files_when_there_are_many_buckets_then_ours_and_the_forks_are_read(
    facts: Facts,
) -> None:
    for each in facts[MIXED]:
        assert [fact for fact, is_true in each.facts.items() if not is_true] == []
        assert each.buckets["one"] == 1 < each.buckets["many"]


def test_own_files_when_the_state_of_one_rank_is_wrong_then_nothing_changes_on_any(
    facts: Facts,
) -> None:
    refused = [each.refused for each in facts[MIXED]]
    assert [(each.kind, each.unchanged) for each in refused] == [
        ("RanksDisagreeError", True),
        ("CheckpointError", True),
    ]
    assert_mentions(refused[1].text, "The optimizer state holds elements none of", "--dp N")


@pytest.mark.long
def test_own_files_when_one_has_less_than_another_then_ours_are_read(tmp_path: Path) -> None:
    found = run_ranks(collect_facts, 3, "fused", OWN_OF_THREE, tmp_path, seconds=600.0)
    assert [
        fact
        for each in found
        for own in each.values()
        for fact, is_true in own.facts.items()
        if not is_true
    ] == []
    assert [each[GROUP_MISSING].groups for each in found] == [2, 1, 1]
    assert [each[NOTHING].groups for each in found] == [1, 1, 0]
    assert [each[NOTHING].owned for each in found] == [1, 0, 1]
