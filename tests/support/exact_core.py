"""Trainings of megatron-core whose gradients add up exactly, in any order, so that runs can be compared to the bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from tests.support.cases import Case, Curve
from tests.support.core_version import core_mentions
from tests.support.spawn import run_ranks

EXACT = Case("distopt", steps=3, clip_grad=1e9, lr=0.01)
BF16 = EXACT.of(precision="bf16")
OVERLAPPED: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}
PLAIN: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False, "bucket_size": None}
TIED = not core_mentions(
    "distributed/param_and_grad_buffer.py", "if param_start_index % self.data_parallel_world_size != 0"
)


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """In the block options of ours are set by variables of the environment."""
    with mock.patch.dict(os.environ, {f"MEGATRON_DISTOPT_{name}": value for name, value in values.items()}):
        yield


def _on_a_grid(original: Any) -> Any:
    """Gradients as multiples of 2**-12, of which fp32 holds every sum that these models have."""

    def start(group: Any, *args: Any, **kwargs: Any) -> Any:
        for bucket in group.buckets:
            bucket.grad_data.mul_(2.0**12).round_().div_(2.0**12)
        return original(group, *args, **kwargs)

    return start


@contextlib.contextmanager
def exact_sums() -> Iterator[None]:
    """In the block the host reduces gradients that are rounded to a grid."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start = _on_a_grid(_ParamAndGradBucketGroup.start_grad_sync)
    with mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start):
        yield


def train_exactly(case: Case, **options: str) -> Curve:
    """Collective: `gpt.train` with options of ours, by name in upper case."""
    from tests.support import gpt

    with variables(options), exact_sums():
        return gpt.train(case)


@contextlib.contextmanager
def exact_training(case: Case, **options: str) -> Iterator[Any]:
    """In the block there is a `gpt.Training`, with options of ours by name in upper case."""
    from tests.support import gpt

    with variables(options), exact_sums(), contextlib.closing(gpt.Training(case)) as training:
        yield training


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of any element."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


Compared = tuple[float, list[float], list[float]]


def compared(ours: Curve, whole: Curve) -> Compared:
    """How far the params are apart, and both losses."""
    return distance(ours.params, whole.params), ours.losses, whole.losses


def assert_equal(found: Sequence[Compared], num_ranks: int) -> None:
    """Asserts that all ranks found two curves equal to the bit, and that something was trained."""
    assert len(found) == num_ranks
    for apart, ours, whole in found:
        assert apart == 0.0, f"{apart}, losses {ours}, and {whole}"
        assert ours == whole
        assert ours[-1] != ours[0]


def crossed(case: Case, options: Mapping[str, str], folder: str, *, with_head: bool) -> list[tuple[bool, list[float]]]:
    """Collective: from Adam to the optimizer of the options and back: whether params stay, and losses thereafter."""
    found = []
    for number, (saves, loads) in enumerate((({}, options), (options, {}))):
        with exact_training(case, **saves) as training:
            training.step()
            training.optimizer.save(f"{folder}/crossed{number}")
            params, head = training.params(), training.optimizer.state_dict()
        with exact_training(case, **loads) as training:
            if with_head:
                training.optimizer.load_state_dict(head)
            training.optimizer.load(f"{folder}/crossed{number}")
            is_same = distance(training.params(), params) == 0.0
            training.steps_taken = 1
            found.append((is_same, [training.step().loss for _ in range(3)]))
    return found


def assert_learns(found: Sequence[Sequence[tuple[bool, list[float]]]]) -> None:
    """Asserts, of all ranks, that params stayed in `crossed` and that the loss falls."""
    for is_same, losses in (one for of_rank in found for one in of_rank):
        assert is_same
        assert losses[-1] < 4.9, losses


def in_worlds_of_two_and_four(collect: Callable[..., Any], folder: Path) -> dict[Any, list[Any]]:
    """What the ranks of both worlds have collected, by name."""
    found: dict[Any, list[Any]] = {}
    for size in (2, 4):  # with a time limit for a machine that does other things as well
        for of_rank in run_ranks(collect, size, str(folder), seconds=300, core=True):
            for name, value in of_rank.items():
                found.setdefault(name, []).append(value)
    return found


def refusals(
    trainings: Mapping[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]],
) -> dict[str, str]:
    """Collective: the message with which each begins, by name; what it should have in it is not looked at."""
    from megatron_distopt.errors import DistOptError

    found = {}
    for name, (_, start) in trainings.items():
        try:
            with start():
                found[name] = "accepted"
        except DistOptError as error:
            found[name] = str(error)
    return found
