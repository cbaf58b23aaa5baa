"""Trainings of megatron-core whose gradients add up exactly, in any order, so that runs can be
compared to the bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor

from tests.support.cases import Case, Curve

EXACT = Case("distopt", steps=3, clip_grad=1e9, lr=0.01, num_microbatches=1)
BF16 = EXACT.of(precision="bf16")
OVERLAPPED: dict[str, Any] = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 3000,
}
PLAIN: dict[str, Any] = {
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "bucket_size": None,
}


def variables(values: Mapping[str, str]) -> contextlib.AbstractContextManager[object]:
    """In the block options of ours are set by variables of the environment."""
    return mock.patch.dict(
        os.environ, {f"MEGATRON_DISTOPT_{name}": value for name, value in values.items()}
    )


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
