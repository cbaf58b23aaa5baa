"""Checkpoints of the forks of 2023 in our own format: saved at one layout, resumed at another, with
real processes.

One spawn of six ranks runs `collect_facts`; inside it the ranks form worlds of one
to six of them, one after the other. Every resume is looked at twice: what each rank holds right
after the load is compared bit for bit with the saved tensors of the whole model, and what training
makes of it with the run that was not interrupted.

[Note: same arithmetic] Sums over another number of ranks are the same only where they are exact.
`--grid-grads` rounds each microbatch's gradients to multiples of 2**-8; a constant loss scale of as
many as there are microbatches takes the division by their number out of the backward pass, so that
every layout rounds the same numbers. All that is left is the division of an exact sum by the batch
size. Without clipping, whose norm is summed in another order, the state is then the same bit for
bit at every data-parallel size.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_distopt
from megatron_distopt.checkpoint.manifest import MAIN, key_of
from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.checkpoint.whole_model import owned_pieces
from megatron_distopt.layout import Span
from tests.support.facts import Facts, facts_of
from tests.support.fork_worlds import ForkInWorlds, held
from tests.support.mini_fork import Iteration, TrainingRun, core_folder, point_to
from tests.support.refusals import assert_mentions, raised
from tests.support.values import same

pytestmark = pytest.mark.long

RANKS, SAVED_AT, ITERATIONS = 6, 2, 4
FLAG = "--use-distributed-optimizer"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks along each axis: data, tensor, pipeline, and Ulysses' sequence."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1

    def __str__(self) -> str:
        axes = dataclasses.asdict(self)
        return " ".join(f"{name}{size}" for name, size in axes.items() if size > 1 or name == "dp")

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp * self.sp

    @property
    def words(self) -> tuple[str, ...]:
        model = (
            "--tensor-model-parallel-size",
            str(self.tp),
            "--pipeline-model-parallel-size",
            str(self.pp),
        )
        return (*model, *(("--ds-sequence-parallel-size", str(self.sp)) if self.sp > 1 else ()))


#: torch_fused on a CPU rounds the last elements of a shard, which fill no vector, in another way
#: than the others.
ADAM_OF_EQUAL_TAILS = ("--distopt-adam", "torch_foreach")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A training that is not interrupted and leaves checkpoints."""

    layout: Layout
    words: tuple[str, ...] = ("--bf16",)
    batch: int = 6  # samples of an iteration, one a microbatch
    is_exact: bool = True  # see [Note: same arithmetic]

    def flags(self, layout: Layout) -> tuple[str, ...]:
        """Of the same training at any layout."""
        batch = ("--global-batch-size", str(self.batch), "--micro-batch-size", "1")
        exact = (
            "--grid-grads",
            "--clip-grad",
            "0",
            "--loss-scale",
            str(self.batch // layout.dp),
            *ADAM_OF_EQUAL_TAILS,
        )
        return (FLAG, *self.words, *layout.words, *batch, *(exact if self.is_exact else ()))


#: The scale grows after every second update and never overflows.
FP16 = ("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "2")
UNTIED = ("--bf16", "--untie-embeddings-and-output-weights")
APART = ("--bf16", "--experts", "--expert-model-parallel-size", "2")
SIX_LAYERS = ("--bf16", "--num-layers", "6")

SAVED: dict[str, Saved] = {
    "one": Saved(Layout(1)),
    "two": Saved(Layout(2)),
    "clipped": Saved(Layout(2), is_exact=False),
    "fp32": Saved(Layout(3), ()),
    "fp32 norms": Saved(Layout(2), ("--bf16", "--fp32-norms")),
    "fp16": Saved(Layout(2), FP16, is_exact=False),
    "experts": Saved(Layout(2), ("--bf16", "--experts")),
    "experts apart": Saved(Layout(2), APART, batch=4),
    "frozen": Saved(Layout(2), ("--bf16", "--frozen-param")),
    "untied stages": Saved(Layout(2, pp=2), UNTIED),
    "stages": Saved(Layout(1, pp=2), is_exact=False),
    "slices": Saved(Layout(1, tp=2)),
    "stages and slices": Saved(Layout(1, tp=2, pp=2), is_exact=False),
    "replicas of stages": Saved(Layout(3, pp=2), SIX_LAYERS, is_exact=False),
    "multi-query": Saved(Layout(1, tp=2), ("--bf16", "--multi-query"), is_exact=False),
    "sequences": Saved(Layout(2, sp=2), is_exact=False),
    "padded": Saved(Layout(1), ("--bf16", "--vocab-size", "63"), is_exact=False),
}
#: Resumes that compute something else: sentences of another vocabulary, attention over the whole
#: sequence.
OF_STATE_ALONE = ("padded", "sequences")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A resume of what was saved."""

    saved: str  # key of `SAVED`
    layout: Layout  # of the run that loads
    tolerance: float | None = None  # of the loss; None where the end is the same bit for bit
    words: tuple[str, ...] = ()  # in addition to those of the saved run

    def __str__(self) -> str:
        return " ".join((f"{self.saved}: {SAVED[self.saved].layout} to {self.layout}", *self.words))

    @property
    def is_by_the_fork(self) -> bool:
        """Whether the fork's own load takes its model file."""
        old, new = SAVED[self.saved].layout, self.layout
        return (old.tp, old.pp) == (new.tp, new.pp)


#: Gradients are added up in another order, or computed by other parts of a matrix: some of the
#: 7,744 params round to their other neighbour. A run that has lost its moments is 6e-3 and more
#: away (of six layers 3e-4).
ROUNDED = 1e-3
#: Of a loss of 4 the last bit is 4.8e-7. Another order of sums moves it by a few of them; lost
#: moments move it by 8e-3.
ROUNDED_FP32 = 1e-5

PAIRS = [
    Pair("one", Layout(6)),
    Pair("two", Layout(3)),
    Pair("fp32", Layout(2)),
    Pair("fp32 norms", Layout(3)),
    Pair("fp16", Layout(3), ROUNDED),
    Pair("experts", Layout(3)),
    Pair("experts apart", Layout(4)),
    Pair("frozen", Layout(3)),
    Pair("untied stages", Layout(2)),
    Pair("stages", Layout(1), ROUNDED),
    Pair("slices", Layout(2, tp=2)),
    Pair("slices", Layout(3), ROUNDED),
    Pair("clipped", Layout(1, tp=2, pp=2), ROUNDED),
    Pair("stages and slices", Layout(3), ROUNDED),
    Pair("replicas of stages", Layout(1, tp=2, pp=3), ROUNDED),
    Pair("multi-query", Layout(2), ROUNDED),
    Pair("sequences", Layout(3), ROUNDED),
    Pair("padded", Layout(1, tp=2), ROUNDED, ("--vocab-size", "64")),
]


# In the ranks.


@dataclasses.dataclass(frozen=True)
class Resumed:
    """One resume on one rank."""

    iterations: tuple[Iteration, ...]  # on the rank that logs
    numel: int  # elements of the state that were compared
    differences: tuple[str, ...]  # what was not as saved, right after the load


class _Reader:
    """A checkpoint of which every tensor is read once."""

    def __init__(self, folder: Path) -> None:
        self.source: Source = open_checkpoint(folder)
        self._read: dict[str, Tensor] = {}

    def __call__(self, key: str) -> Tensor:
        if key not in self._read:
            self._read[key] = self.source.read(key)
        return self._read[key]


def _folder_in(iteration: Path) -> Path:
    return iteration / "distrib_optim.distopt"


def _saved_at(folder: Path, iteration: int = SAVED_AT) -> Path:
    return folder / f"iter_{iteration:07d}"


def _compare(optimizer: Any, iteration: Path) -> tuple[int, tuple[str, ...]]:
    """Elements of the state that this rank owns, and what of it, or of its model params, is not as
    saved."""
    read, model = _Reader(_folder_in(iteration)), optimizer.fork.whole()
    numel, differences = 0, []
    for piece in owned_pieces(model):
        for key, tensor in piece.tensors():
            saved, mine = _both(read(key), piece.piece.in_global.as_slices(), tensor)
            numel += mine.numel()
            if mine.dtype != saved.dtype or not torch.equal(mine, saved):
                differences.append(f"{key} at {piece.piece.in_global}")
    (share,) = model.shares
    for name, param in optimizer.fork.start.named.items():
        for piece in share.placements[name].pieces(Span(0, param.numel())):
            stretch = (
                param.detach()
                .view(-1)[piece.in_param.as_slice()]
                .view(piece.sizes)[piece.inside.as_slices()]
            )
            whole = read(key_of(MAIN, share.placements[name].name))
            saved, mine = _both(whole, piece.in_global.as_slices(), stretch)
            if not torch.equal(mine, saved.to(param.dtype)):
                differences.append(f"model param {name}")
    return numel, (*differences, *_differences_of_head(optimizer, iteration, read.source))


def _both(whole: Tensor, where: tuple[slice, ...], mine: Tensor) -> tuple[Tensor, Tensor]:
    """The same elements of both; rows of padding that the saved one has not are left out."""
    saved = whole[where]
    return saved, mine[tuple(slice(0, numel) for numel in saved.shape)]


def _differences_of_head(optimizer: Any, iteration: Path, source: Source) -> Iterator[str]:
    ours, theirs = optimizer.state_dict(), _head(iteration)["optimizer"]
    if ours["optimizer"] != theirs["optimizer"]:
        yield f"param groups {ours['optimizer']} and not {theirs['optimizer']}"
    if not same(ours.get("grad_scaler"), theirs.get("grad_scaler")):
        yield f"grad scaler {ours.get('grad_scaler')} and not {theirs.get('grad_scaler')}"
    if optimizer.sharded.num_skipped != source.head.num_skipped:
        yield f"{optimizer.sharded.num_skipped} skipped steps"


def _head(iteration: Path) -> dict[str, Any]:
    """What the fork wrote beside the tensors; it holds an argparse.Namespace and random states."""
    file = min(iteration.glob("mp_rank_*/model_optim_rng.pt"))
    head: dict[str, Any] = torch.load(file, weights_only=False)
    return head


def _load_across(model: Any, optimizer: Any, scheduler: Any) -> int:
    """In the place of the fork's, whose model file is of one tensor- and pipeline-parallel size."""
    from megatron import get_args
    from megatron.checkpointing import (
        get_checkpoint_name,
        get_distributed_optimizer_checkpoint_name,
    )

    args = get_args()
    head = _head(_saved_at(Path(args.load)))
    optimizer.load_state_dict(head["optimizer"])
    name = get_checkpoint_name(args.load, SAVED_AT)
    optimizer.load_parameter_state(get_distributed_optimizer_checkpoint_name(name))
    scheduler.load_state_dict(head["opt_param_scheduler"])
    args.consumed_train_samples = head["args"].consumed_train_samples
    iteration: int = head["iteration"]
    return iteration


class _Fork(ForkInWorlds):
    """With the package installed once for all trainings; it is active in those that have the fork's
    flag."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__("gathered", rank, folder, ranks=RANKS)
        megatron_distopt.install()

    def train(self, *words: str, ours: bool = False) -> TrainingRun:
        """Collective: to the last iteration if the words do not say otherwise."""
        to = () if "--train-iters" in words else ("--train-iters", str(ITERATIONS))
        return super().train(*words, *to, ours=ours)

    def train_and_save(self, name: str, *words: str, every: int = SAVED_AT) -> TrainingRun:
        """Collective: the last checkpoint is forgotten, so that the one of `SAVED_AT` is loaded."""
        folder = self.folder / name
        run = self.train(*words, "--save-interval", str(every), "--save", str(folder))
        point_to(folder, SAVED_AT)
        return run

    def copy(self, name: str, to: str) -> Path:
        """Collective: of what a training has left."""
        if self.rank == 0:
            shutil.copytree(self.folder / name, self.folder / to)
        dist.barrier()
        return self.folder / to

    def resume(self, pair: Pair) -> Resumed:
        """Collective."""
        saved, folder, training = SAVED[pair.saved], self.folder / pair.saved, self.fork.training
        compared: list[tuple[int, tuple[str, ...]]] = []
        look = self.first(lambda optimizer: compared.append(_compare(optimizer, _saved_at(folder))))
        load = training.load_checkpoint if pair.is_by_the_fork else _load_across
        words = (
            *saved.flags(pair.layout),
            *pair.words,
            "--load",
            str(folder),
            "--save",
            str(self.folder / str(pair)),
        )
        with look, mock.patch.object(training, "load_checkpoint", load):
            run = self.train(*words)
        return Resumed(run.iterations, *compared[0])


#: Two ranks, two samples each.
PLAIN = (FLAG, "--bf16")


def _files_in(folder: Path) -> dict[str, list[str]]:
    """What of the optimizer's is in each iteration."""
    found = {}
    for iteration in sorted(folder.glob("iter_*")):
        files = [*iteration.rglob("distrib_optim*.pt"), *iteration.rglob("manifest.json")]
        found[iteration.name] = sorted(file.relative_to(iteration).as_posix() for file in files)
    return found


def _formats(fork: _Fork) -> dict[str, Any]:
    """One run that is stopped after every iteration and changes its format."""
    folder, full = fork.folder / "formats", fork.train(*PLAIN)

    def goes_on(format_name: str, after: int) -> TrainingRun:
        if after:
            point_to(folder, after)
        load = ("--load", str(folder)) if after else ()
        words = (
            *PLAIN,
            "--save",
            str(folder),
            "--exit-interval",
            "1",
            "--distopt-checkpoint-format",
            format_name,
        )
        return fork.train(*words, *load)

    runs = [
        goes_on(name, after)
        for after, name in enumerate(("gathered", "distopt", "gathered", "distopt"))
    ]
    found = {"files": _files_in(folder), "same": same(held(full), held(runs[-1]))}
    goes_on("distopt", 2)
    if fork.rank == 0:  # it is the older of the two, and nobody looks at it
        (_saved_at(folder, 3) / "mp_rank_00/distrib_optim.pt").write_text("not a checkpoint")
    found["same beside an older file"] = same(held(goes_on("distopt", 3)), held(full))
    return found


def _unfinished(fork: _Fork) -> tuple[str, str]:
    """The process ended while it saved the last iteration; the fork has written its own files of
    it."""
    folder = fork.copy("two", "unfinished")
    if fork.rank == 0:
        (_folder_in(_saved_at(folder, ITERATIONS)) / "manifest.json").unlink()
    point_to(folder, ITERATIONS)
    return raised(lambda: fork.train(*SAVED["two"].flags(Layout(2)), "--load", str(folder)))


def _loaded_beside_a_run(fork: _Fork) -> dict[str, Any]:
    """What differs from a save once it is loaded where nobody brought its head, and where a param
    is frozen since."""
    found = {}
    for name, running, saved in (
        ("without head", "fp16", "fp16"),
        ("frozen since", "frozen", "two"),
    ):
        iteration = _saved_at(fork.folder / saved)
        run = fork.train(*SAVED[running].flags(Layout(3)), "--lr", "0.005", "--train-iters", "3")
        if name != "without head":
            run.optimizer.load_state_dict(_head(iteration)["optimizer"])
        run.optimizer.load_parameter_state(str(iteration / "mp_rank_00/distrib_optim.pt"))
        found[name] = _compare(run.optimizer, iteration)[1]
    return found


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    fork = _Fork(rank, folder)
    found: dict[str, Any] = {"saved": {}, "resumed": {}}
    for ranks in range(1, RANKS + 1):
        if fork.enters(ranks):
            for name, saved in SAVED.items():
                if saved.layout.size == ranks:
                    run = fork.train_and_save(name, *saved.flags(saved.layout))
                    found["saved"][name] = run.iterations
    for ranks in range(1, RANKS + 1):
        if fork.enters(ranks):
            for pair in PAIRS:
                if pair.layout.size == ranks:
                    found["resumed"][str(pair)] = fork.resume(pair)
            if ranks == 2:
                found["formats"], found["unfinished"] = _formats(fork), _unfinished(fork)
                fork.train(
                    *PLAIN,
                    "--save",
                    str(fork.folder / "none"),
                    "--no-save-optim",
                    "--train-iters",
                    "1",
                )
            if ranks == 3:
                found["beside a run"] = _loaded_beside_a_run(fork)
    fork.leaves()
    return found


# In the test process.


facts = facts_of(collect_facts, RANKS, seconds=600, before=core_folder)


def _numel_in(folder: Path) -> int:
    return sum(torch.Size(info.shape).numel() for info in open_checkpoint(folder).tensors.values())


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_load_when_the_layout_is_another_then_every_rank_has_what_was_saved_bit_for_bit(
    pair: Pair, facts: Facts
) -> None:
    of_ranks = [each[str(pair)] for each in facts["resumed"] if str(pair) in each]
    assert len(of_ranks) == pair.layout.size
    assert [each.differences for each in of_ranks] == [()] * pair.layout.size
    # Replicas outside of data parallelism hold the same elements again.
    assert sum(each.numel for each in of_ranks) >= _numel_in(
        _folder_in(_saved_at(facts.folder / pair.saved))
    )


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.tolerance is None], ids=str)
def test_resume_when_the_arithmetic_is_the_same_then_the_end_is_the_same_bit_for_bit(
    pair: Pair, facts: Facts
) -> None:
    folders = (facts.folder / pair.saved, facts.folder / str(pair))
    uninterrupted, resumed = (
        _Reader(_folder_in(_saved_at(folder, ITERATIONS))) for folder in folders
    )
    assert uninterrupted.source.tensors == resumed.source.tensors
    assert len(uninterrupted.source.tensors) > 20
    for key in uninterrupted.source.tensors:
        assert torch.equal(uninterrupted(key), resumed(key)), key
    # It is no comparison of zeros, and the state has moved since it was saved.
    before = _Reader(_folder_in(_saved_at(folders[0])))
    moved = [key for key in before.source.tensors if not torch.equal(before(key), resumed(key))]
    assert len(moved) > 0.9 * len(before.source.tensors)


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair.saved not in OF_STATE_ALONE], ids=str
)
def test_resume_when_the_layout_is_another_then_training_goes_on_on_the_curve(
    pair: Pair, facts: Facts, record_property: Callable[[str, object], None]
) -> None:
    uninterrupted = facts.first["saved"][pair.saved][SAVED_AT:]
    resumed = facts.first["resumed"][str(pair)].iterations
    assert len(resumed) == len(uninterrupted) == ITERATIONS - SAVED_AT
    # Where the arithmetic is the same, losses are still averaged over ranks and microbatches in
    # another order.
    tolerance = ROUNDED_FP32 if pair.tolerance is None else pair.tolerance
    deviation = max(
        abs(one.loss - other.loss) for one, other in zip(uninterrupted, resumed, strict=True)
    )
    kind = "same arithmetic" if pair.tolerance is None else "16 bits"
    record_property(
        "deviation", {"what": f"Megatron of 2023, another layout, {kind}", "loss": deviation}
    )
    assert deviation < tolerance
    assert [(each.lr, each.skipped) for each in resumed] == [
        (each.lr, each.skipped) for each in uninterrupted
    ]
    if not SAVED[pair.saved].is_exact:  # there the scale is that of the layout
        assert [each.loss_scale for each in resumed] == [each.loss_scale for each in uninterrupted]


NATIVE, OURS = "mp_rank_00/distrib_optim.pt", "distrib_optim.distopt/manifest.json"


def test_format_when_it_changes_within_a_run_then_the_run_goes_on_and_no_older_state_is_taken(
    facts: Facts,
) -> None:
    first, second = (each["formats"] for each in facts.by_rank[:2])
    assert first["same"] and second["same"]
    iterations = [f"iter_{number:07d}" for number in range(1, 5)]
    assert first["files"] == dict(
        zip(iterations, [[NATIVE], [OURS], [NATIVE], [OURS]], strict=True)
    )
    assert first["same beside an older file"] and second["same beside an older file"]


def test_save_when_the_fork_is_told_not_to_save_the_optimizer_then_no_file_of_it_is_there(
    facts: Facts,
) -> None:
    files = {path.name for path in _saved_at(facts.folder / "none", 1).rglob("*")}
    assert files == {"mp_rank_00", "model_optim_rng.pt"}


def test_load_when_the_last_save_never_ended_then_the_iteration_that_did_is_named(
    facts: Facts,
) -> None:
    folder = _saved_at(facts.folder / "unfinished", ITERATIONS)
    for each in facts.by_rank[:2]:
        kind, text = each["unfinished"]
        assert kind == "CheckpointError"
        assert_mentions(
            text, f"{_folder_in(folder)}/manifest.json", f"{folder}/mp_rank_00/distrib_optim.pt"
        )
        assert_mentions(
            text,
            f"Write {SAVED_AT} into latest_checkpointed_iteration.txt",
            f"that of {SAVED_AT} did",
        )


@pytest.mark.parametrize("name", ["without head", "frozen since"])
def test_load_when_less_is_given_than_was_saved_then_the_rest_is_as_saved(
    name: str, facts: Facts
) -> None:
    assert [each["beside a run"][name] for each in facts.by_rank[:3]] == [()] * 3
