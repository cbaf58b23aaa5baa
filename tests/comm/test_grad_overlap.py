"""When a bucket is launched: counted on one rank, whose collectives are over at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import GradOverlap, Group, Reduction
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import ParamSpec, lay_out


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Group.of()
    dist.destroy_process_group()


@dataclass
class Steps:
    """Steps of a model with one bucket for each of its params "a", "b" and "c"."""

    group: Group
    microbatches: int = 1
    divide_by: int = 1
    overlap: GradOverlap = field(init=False)
    buffer: ShardedBuffer = field(init=False)

    def __post_init__(self) -> None:
        layout = lay_out([ParamSpec(name, 4) for name in "abc"], num_shards=1, bucket_size=1, alignment_numel=1)
        self.buffer = ShardedBuffer(layout, 0, torch.ones(layout.numel), torch.zeros(layout.numel))
        self.overlap = GradOverlap(
            [self.buffer], self.group, num_microbatches=lambda: self.microbatches, how=Reduction(self.divide_by)
        )

    def begun(self, arrivals: str) -> list[int]:
        """Buckets under way after each gradient of a step, which ends."""
        found = []
        for name in arrivals:
            self.overlap.arrived(name)
            found.append(self.overlap.num_begun)
        self.overlap.finish()
        return found


def test_bucket_when_the_first_step_has_shown_the_order_then_each_goes_with_its_last_gradient(group: Group) -> None:
    steps = Steps(group)
    assert steps.begun("cab") == [0, 0, 0]
    assert steps.begun("cab") == [1, 2, 3]
    assert steps.begun("abc") == [0, 0, 3]  # in the order that was agreed upon


def test_bucket_when_there_are_microbatches_then_the_last_one_counts(group: Group) -> None:
    steps = Steps(group, microbatches=2)
    steps.begun("abcabc")
    assert steps.begun("abcabc") == [0, 0, 0, 1, 2, 3]


def test_bucket_when_the_number_of_microbatches_changes_then_the_new_one_counts(group: Group) -> None:
    steps = Steps(group, microbatches=2)
    steps.begun("abcabc")
    steps.microbatches = 3
    assert steps.begun("abcabcabc") == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    steps.microbatches = 1
    assert steps.begun("abc") == [1, 2, 3]


def test_bucket_when_a_gradient_comes_twice_in_a_microbatch_then_the_second_one_counts(group: Group) -> None:
    steps = Steps(group, microbatches=2)
    steps.begun("abbcabbc")
    assert steps.begun("abbcabbc") == [0, 0, 0, 0, 1, 1, 2, 3]


def test_bucket_when_a_gradient_does_not_come_in_every_microbatch_then_it_goes_at_the_end(group: Group) -> None:
    steps = Steps(group, microbatches=2)
    steps.begun("abcac")
    assert steps.begun("abcac") == [0, 0, 0, 1, 2]  # b last, and nobody waits for it
    steps.microbatches = 1
    assert steps.begun("abc") == [1, 1, 2]


def test_bucket_when_a_gradient_came_in_no_step_then_nobody_waits_for_it(group: Group) -> None:
    steps = Steps(group)
    steps.begun("ac")
    assert steps.begun("ac") == [1, 2]
    assert steps.begun("abc") == [1, 1, 2]
    assert steps.begun("acb") == [1, 2, 3]  # now it is known


def test_gradient_when_its_bucket_is_under_way_then_refused(group: Group) -> None:
    steps = Steps(group)
    steps.begun("abc")
    steps.overlap.arrived("a")
    with pytest.raises(LayoutError, match="arrived after its bucket was reduced"):
        steps.overlap.arrived("a")


def test_deferred_when_a_bucket_is_not_under_way_then_it_goes_at_the_end_from_then_on(group: Group) -> None:
    steps = Steps(group)
    steps.overlap.arrived("b")
    steps.overlap.defer("b")
    steps.overlap.arrived("a")
    steps.overlap.arrived("c")
    steps.overlap.finish()
    assert steps.begun("abc") == [1, 1, 2]


def test_deferred_when_a_bucket_is_under_way_then_refused(group: Group) -> None:
    steps = Steps(group)
    steps.begun("abc")
    steps.overlap.arrived("a")
    steps.overlap.defer("c")
    with pytest.raises(LayoutError) as error:
        steps.overlap.defer("a")
    assert str(error.value) == (
        "Invalid gradient of 'a': changed after backward, when its bucket was under way. Must be complete when "
        "backward ends. Write --distopt-overlap-grad-reduce no, or overlap_grad_reduce=False."
    )


def test_bucket_when_grads_are_divided_before_the_sum_then_each_is_divided_once(group: Group) -> None:
    steps = Steps(group, divide_by=4)
    steps.begun("abc")
    assert steps.buffer.grad.tolist() == [0.25] * 12
    steps.begun("abc")
    assert steps.buffer.grad.tolist() == [0.0625] * 12
