"""When buckets are launched, and what is refused: on one rank, whose collectives end at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Communicator, Group, Reduction, communicator
from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import ParamSpec, lay_out
from tests.support.refusals import assert_mentions, refused


@pytest.fixture
def group(one_rank: None) -> Group:
    return Group.of()


def _buffer(names: str) -> ShardedBuffer:
    """One with a bucket for each param."""
    layout = lay_out(
        [ParamSpec(name, 4) for name in names], num_shards=1, bucket_size=1, alignment_numel=1
    )
    return ShardedBuffer(layout, 0, torch.ones(layout.numel), torch.zeros(layout.numel))


@dataclass
class Steps:
    """Steps of a model with one bucket for each of its params "a", "b" and "c"."""

    group: Group
    microbatches: int = 1
    divide_by: int = 1
    communicator: Communicator = field(init=False)
    buffer: ShardedBuffer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = _buffer("abc")
        self.communicator = Communicator(
            self.group,
            Reduction(self.divide_by),
            overlap_grads=True,
            num_microbatches=lambda: self.microbatches,
        )
        self.communicator.add([self.buffer], [self.buffer])

    def begun(self, arrivals: str) -> list[int]:
        """Buckets under way after each gradient of a step, which ends."""
        found = []
        for name in arrivals:
            self.communicator.grad_arrived(name)
            found.append(self.communicator.num_reducing)
        self.communicator.finish_grads()
        return found


def test_bucket_when_the_first_step_has_shown_the_order_then_each_goes_with_its_last_gradient(
    group: Group,
) -> None:
    steps = Steps(group)
    assert steps.begun("cab") == [0, 0, 0]
    assert steps.begun("cab") == [1, 2, 3]
    assert steps.begun("abc") == [0, 0, 3]  # in the order that was agreed upon


def test_bucket_when_the_number_of_microbatches_changes_then_the_new_one_counts(
    group: Group,
) -> None:
    steps = Steps(group, microbatches=2)
    steps.begun("abcabc")
    steps.microbatches = 3
    assert steps.begun("abcabcabc") == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    steps.microbatches = 1
    assert steps.begun("abc") == [1, 2, 3]


def test_bucket_when_a_gradient_comes_twice_in_a_microbatch_then_the_second_one_counts(
    group: Group,
) -> None:
    steps = Steps(group, microbatches=2)
    steps.begun("abbcabbc")
    assert steps.begun("abbcabbc") == [0, 0, 0, 0, 1, 1, 2, 3]


def test_bucket_when_a_gradient_does_not_come_in_every_microbatch_then_it_goes_at_the_end(
    group: Group,
) -> None:
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
    steps.communicator.grad_arrived("a")
    with pytest.raises(LayoutError, match=r"gradient of 'a'.*no_sync"):
        steps.communicator.grad_arrived("a")


def test_deferred_when_a_bucket_is_not_under_way_then_it_goes_at_the_end_from_then_on(
    group: Group,
) -> None:
    steps = Steps(group)
    steps.communicator.grad_arrived("b")
    steps.communicator.defer("b")
    steps.communicator.grad_arrived("a")
    steps.communicator.grad_arrived("c")
    steps.communicator.finish_grads()
    assert steps.begun("abc") == [1, 1, 2]


def test_deferred_when_a_bucket_is_under_way_then_refused(group: Group) -> None:
    steps = Steps(group)
    steps.begun("abc")
    steps.communicator.grad_arrived("a")
    steps.communicator.defer("c")
    assert_mentions(
        refused(LayoutError, lambda: steps.communicator.defer("a")),
        "'a'",
        "overlap_grad_reduce=False",
    )


def test_buffers_when_they_are_added_while_others_are_under_way_then_each_bucket_is_reduced_once(
    group: Group,
) -> None:
    steps = Steps(group, divide_by=4)
    steps.begun("abc")
    steps.communicator.grad_arrived("a")
    added = _buffer("de")
    steps.communicator.add([added], [added])
    assert steps.communicator.num_reducing == 1
    steps.communicator.grad_arrived("b")
    steps.communicator.grad_arrived("c")
    steps.communicator.finish_grads()
    assert steps.buffer.grad.tolist() == [0.0625] * 12
    assert added.grad.tolist() == [0.25] * 8
    assert steps.begun("abcde") == [1, 2, 3, 3, 3]
    assert steps.begun("abcde") == [1, 2, 3, 4, 5]


class _Failing:
    """A gather of a rank that has lost another one."""

    def wait(self) -> None:
        raise RuntimeError("rank 1 has ended")


def test_param_when_its_gather_failed_then_every_wait_for_it_fails(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, failing = communicator.all_gather, iter([False, True])
    monkeypatch.setattr(
        communicator,
        "all_gather",
        lambda *args, **more: _Failing() if next(failing) else begin(*args, **more),
    )
    overlapped, buffer = Communicator(group, overlap_params=True), _buffer("ab")
    overlapped.add([buffer], [buffer])
    overlapped.gather()
    overlapped.param_needed("b")  # the first that forward needs
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            overlapped.finish_params()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        overlapped.param_needed("a")
    assert overlapped.param_needed("b")
