"""The same small GPT, seed and data with the optimizers of a fork of 2023 and with ours.

With torch's Adam and no clipping, the fork's optimizer without sharding ("plain") and ours compute
the same to the last bit: in one bucket, and in many with communication hidden behind computation.
The fork's fused Adam and its clipping round elsewhere than ours: what that does to a curve is
measured in test_megatron_2023_checkpoints.py.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.comm import Communicator
from tests.support.facts import Facts, facts_of
from tests.support.fork_worlds import slow_gathers
from tests.support.mini_fork import InstalledFork, MiniFork, TrainingRun, core_folder

DISTRIBUTED = "--use-distributed-optimizer"
#: The arithmetic of torch.optim.Adam, which the fork has with MINI_FORK_ADAM=torch.
AS_TORCH = (DISTRIBUTED, "--distopt-decay", "l2", "--distopt-adam", "torch_foreach")
#: The model has 7,744 elements.
OVERLAPPED = ("--distopt-bucket-size", "700", "--distopt-overlap-grad-reduce", "yes")
BOTH = (*OVERLAPPED, "--distopt-overlap-param-gather")


@dataclass(frozen=True)
class Case:
    """One training, run with several optimizers."""

    words: str
    # the plain reference averages experts and sequence-parallel ranks over the right groups
    repaired: bool = False
    overlapped: bool = False  # ours runs again in many buckets, with grads and params overlapped
    # what happens to the wrapped model before its optimizer is built, see `CHANGES`
    change: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.words.split(), "--clip-grad", "1e9", "--train-iters", "3")


@dataclass(frozen=True)
class Distance:
    """How far two trainings ended up from each other, on one rank."""

    param: float  # absolute, of the params after the last step
    loss: float  # absolute, over all iterations
    norm: float  # relative, over all iterations
    is_equal: bool  # every param, to the last bit
    zeros: bool  # the numbers of zeros in the gradient are the same


@dataclass(frozen=True)
class Comparison:
    """Of one case on one rank."""

    ours_plain: Distance
    losses: list[float]  # ours; of the rank that logs
    overlapped: Mapping[str, Distance]  # from the plain one, by what was overlapped
    early: list[int]  # by step, buckets that were under way when backward had ended
    buckets: int  # of the first buffer then


FP16 = "--fp16 --initial-loss-scale 4096"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EXPERTS = "--experts --expert-model-parallel-size 2"
# The word embeddings of tokens that do not occur have a gradient of zero only where the output
# layer has others.
UNTIED = "--untie-embeddings-and-output-weights"
ZEROS = f"{UNTIED} --log-num-zeros-in-grad"

#: 1,105 elements, which two ranks pad.
ODD = "--hidden-size 5 --num-attention-heads 1 --vocab-size 63 --seq-length 10 --micro-batch-size 1"

#: On two ranks of a gathered file; those with the process groups of the one before take a third of
#: the time.
TWO = {
    "dp2-fp32": Case(ZEROS),
    "overlapped-bf16": Case("--bf16", overlapped=True),
    "overlapped-fp16-that-overflows": Case("--fp16 --initial-loss-scale 1e30", overlapped=True),
    **{
        f"{change}-bf16": Case("--bf16", overlapped=True, change=change)
        for change in ("frozen-late", "built-twice")
    },
    "accumulation-bf16": Case("--bf16 --global-batch-size 8", overlapped=True),
    "padded-fp32-norms-bf16": Case(f"--bf16 --fp32-norms {ODD}"),
    "fp32-norms-bf16": Case("--bf16 --fp32-norms", overlapped=True),
    "frozen-bf16": Case("--bf16 --frozen-param", overlapped=True),
    "fp32-grads-fp16": Case(f"{FP16} {ZEROS} --accumulate-allreduce-grads-in-fp32"),
    "pp2-bf16": Case(f"--bf16 {PP2} --global-batch-size 4"),
    "multi-query-sequence-parallel-bf16": Case(f"--bf16 {TP2} --multi-query --sequence-parallel"),
    "ulysses-fp32": Case("--ds-sequence-parallel-size 2", repaired=True, overlapped=True),
    "experts-bf16": Case(f"--bf16 {EXPERTS}", repaired=True),
}
#: On four; long.
FOUR = {
    "tp2-dp2-bf16": Case(f"--bf16 {TP2} --sequence-parallel", overlapped=True),
    # Ours adds the embedding's two stages up before the ranks, as the fork's distributed optimizer;
    # its plain one the other way round. On a grid both sums are exact.
    "pp2-dp2-bf16": Case(f"--bf16 {PP2} --grid-grads --global-batch-size 12", overlapped=True),
    # gloo adds four ranks up in an order that depends on the place in the buffer; the plain
    # reference has experts in tensors of their own, which moves the others.
    "experts-fp32-norms-bf16": Case(
        f"--bf16 {EXPERTS} --fp32-norms --grid-grads", repaired=True, overlapped=True
    ),
}


def collect_facts(rank: int, size: int, exact: dict[str, Case], norms: str) -> dict[str, Any]:
    """In a rank: every case with the fork's plain optimizer, with ours, and some with its
    distributed one."""
    fork = InstalledFork.imported(file_layout="gathered", adam="torch")
    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Any] = _compare_each(fork, exact)
        if norms:
            found["norms"] = _norms(fork, norms)
    return found


def _compare_each(fork: MiniFork, cases: dict[str, Case]) -> dict[str, Comparison]:
    """All of the fork's trainings, then all of ours from the last to the first: less is installed
    and set up anew."""
    from megatron.model import distributed

    of_fork = {}
    for name, case in cases.items():
        repaired = mock.patch.object(distributed, "REPAIRED", case.repaired or distributed.REPAIRED)
        with _changed(fork, case), repaired:
            of_fork[name] = fork.train(*case.flags, ours=False)
    return {name: _compare(fork, case, of_fork[name]) for name, case in reversed(cases.items())}


def _compare(fork: MiniFork, case: Case, plain: TrainingRun) -> Comparison:
    early, overlapped, flags, buckets = (
        list[int](),
        dict[str, Distance](),
        (*case.flags, *AS_TORCH),
        1,
    )
    with _changed(fork, case):
        if case.overlapped:
            with slow_gathers(), _noting_early(early):
                both = fork.train(*flags, *BOTH)
            overlapped["both"] = _distance(both, plain)
            buckets = len(both.optimizer.fork.grad_buffers[0].plan.layout.buckets)
            if case.words == "--bf16" and not case.change:
                overlapped["grads"] = _distance(fork.train(*flags, *OVERLAPPED), plain)
        ours = fork.train(*flags)
    return Comparison(
        ours_plain=_distance(ours, plain),
        losses=ours.losses,
        overlapped=overlapped,
        early=early,
        buckets=buckets,
    )


def _noting_early(early: list[int]) -> contextlib.AbstractContextManager[object]:
    original = Communicator.finish_grads

    def finish(self: Communicator) -> Any:
        if self.overlaps_grads:
            early.append(self.num_reducing)
        return original(self)

    return mock.patch.object(Communicator, "finish_grads", finish)


def _frozen_after_wrapping(fork: MiniFork, chunks: Any) -> None:
    """What a fork's grad buffers have a place for, and no gradient comes of."""
    for name, param in chunks[0].named_parameters():
        param.requires_grad_("input_layernorm" not in name)


def _built_before(fork: MiniFork, chunks: Any) -> None:
    """An optimizer of which nothing is left but what it hooked."""
    fork.training.get_megatron_optimizer(chunks)


CHANGES = {"frozen-late": _frozen_after_wrapping, "built-twice": _built_before}


def _changed(fork: MiniFork, case: Case) -> contextlib.AbstractContextManager[object]:
    if not case.change:
        return contextlib.nullcontext()
    original = fork.training.get_model

    def get_model(*args: Any, **kwargs: Any) -> Any:
        chunks = original(*args, **kwargs)
        CHANGES[case.change](fork, chunks)
        return chunks

    return mock.patch.object(fork.training, "get_model", get_model)


def _distance(ours: TrainingRun, theirs: TrainingRun) -> Distance:
    pairs = [(param, theirs.params[name]) for name, param in ours.params.items()]
    rows = list(zip(ours.iterations, theirs.iterations, strict=True))
    return Distance(
        param=max(float((a.double() - b.double()).abs().max()) for a, b in pairs),
        loss=max((abs(a.loss - b.loss) for a, b in rows), default=0.0),
        norm=max((_relative(a.grad_norm, b.grad_norm) for a, b in rows), default=0.0),
        is_equal=all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs),
        zeros=all(a.num_zeros == b.num_zeros for a, b in rows),
    )


def _relative(ours: float | None, theirs: float | None) -> float:
    """Of two norms; a step without one has none on both sides, or they are infinitely far apart."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / theirs


@dataclass(frozen=True)
class Norms:
    """Of one training on one rank: what our optimizer said at each step and what the gradient says
    in float64."""

    ours: list[float]
    wanted: list[float]
    zeros: list[int]
    zeros_wanted: list[int]


#: Flags. Nothing but the data-parallel average may happen to a gradient after the backward pass, so
#: embeddings are not tied over stages.
NORMS = f"--bf16 {EXPERTS}"


def _norms(fork: MiniFork, words: str) -> Norms:
    wanted: list[tuple[float, int]] = []
    original = fork.training._update

    def update(model: Any, optimizer: Any, scheduler: Any) -> Any:
        wanted.append(_norm_and_zeros_in_float64(model, float(optimizer.get_loss_scale())))
        return original(model, optimizer, scheduler)

    with mock.patch.object(fork.training, "_update", update):
        run = fork.train(*words.split(), DISTRIBUTED, *ZEROS.split())
    rows = run.iterations
    return Norms(
        [row.grad_norm for row in rows],  # type: ignore[misc]
        [norm for norm, _ in wanted],
        [row.num_zeros for row in rows],  # type: ignore[misc]
        [zeros for _, zeros in wanted],
    )


def _norm_and_zeros_in_float64(model: Any, loss_scale: float) -> tuple[float, int]:
    """Collective: of the gradient of one copy of the whole model, from what every rank has before
    the reduction."""
    from megatron.core import mpu

    squares, zeros = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for param in model[0].parameters():
        group = mpu.get_data_parallel_group()
        if not getattr(param, "allreduce", True):
            group = mpu.get_expert_data_parallel_group()
        grad = param.main_grad.double()
        dist.all_reduce(grad, group=group)
        is_mine = dist.get_rank(group) == 0
        is_whole = (
            getattr(param, "tensor_model_parallel", False)
            or mpu.get_tensor_model_parallel_rank() == 0
        )
        if is_mine and is_whole:
            squares += (grad / (mpu.get_data_parallel_world_size() * loss_scale)).square().sum()
            zeros += grad.numel() - torch.count_nonzero(grad)
    dist.all_reduce(squares)
    dist.all_reduce(zeros)
    return math.sqrt(squares.item()), int(zeros.item())


two = facts_of(collect_facts, 2, TWO, NORMS, seconds=240, before=core_folder)
four = facts_of(collect_facts, 4, FOUR, "", seconds=240, before=core_folder)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *(("two", name) for name in TWO),
        *(pytest.param("four", name, marks=pytest.mark.long) for name in FOUR),
    ],
)
def test_training_when_distributed_then_every_bit_is_that_of_the_plain_optimizer(
    ranks: str, name: str, request: pytest.FixtureRequest
) -> None:
    comparisons = request.getfixturevalue(ranks)[name]
    for rank, comparison in enumerate(comparisons):
        for what, distance in {"": comparison.ours_plain, **comparison.overlapped}.items():
            found = (distance.param, distance.is_equal, distance.loss, distance.zeros)
            assert found == (0.0, True, 0.0, True), (rank, what)
            # The fork adds the squares up in fp32: some ulps of 6e-8. A rank of its plain optimizer
            # knows its own experts only; with them, ours is compared with float64 below.
            assert distance.norm <= 1e-6 or name.startswith("experts")
    logged = next(each.losses for each in comparisons if each.losses)
    assert len(set(logged)) == 3, "every iteration has other data"


@pytest.mark.parametrize("name", [name for name, case in TWO.items() if case.overlapped])
def test_grads_when_overlapped_then_from_the_second_step_on_all_buckets_go_before_backward_ends(
    name: str, two: Facts
) -> None:
    for comparison in two[name]:
        assert comparison.early[-2:] == [comparison.buckets] * 2
        assert comparison.buckets > 5
        assert TWO[name].change or (len(comparison.early), comparison.early[0]) == (3, 0)


def test_norm_and_zeros_when_computed_in_float64_then_they_are_those_of_one_copy_of_the_model(
    two: Facts,
) -> None:
    logged = next(found for found in two["norms"] if found.ours)
    # Ours adds up squares in fp32 in pieces of 65,536 elements, the pieces in float64.
    assert logged.ours == pytest.approx(logged.wanted, rel=1e-6)
    assert logged.zeros == logged.zeros_wanted
    assert min(logged.zeros) > 100
