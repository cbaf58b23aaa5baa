"""Whose memory an operation touches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_distopt.hosts.watch import Watch

#: "a" and "b" lie in one buffer with a gap between them, "c" apart.
BUFFER, APART = torch.zeros(40), torch.zeros(6, dtype=torch.bfloat16)
TENSORS = {"a": BUFFER[:10].view(2, 5), "b": BUFFER[20:40], "c": APART}


def _seen(act: Callable[[], object], *, writes_only: bool) -> set[str]:
    seen: set[str] = set()
    with Watch(TENSORS, seen.add, writes_only=writes_only):
        act()
    return seen


@pytest.mark.parametrize(
    ("act", "reads", "writes"),
    [
        (lambda: TENSORS["a"] + 1, "a", ""),
        (lambda: TENSORS["a"].add_(1), "a", "a"),
        (lambda: TENSORS["a"].data.add_(1), "a", "a"),
        (TENSORS["a"].detach().view(-1)[3:4].zero_, "a", "a"),
        (BUFFER.zero_, "ab", "ab"),
        (BUFFER[10:20].zero_, "", ""),
        (BUFFER[9:21].zero_, "ab", "ab"),
        (BUFFER[::15].zero_, "ab", "ab"),  # as far as it reaches
        (lambda: APART.view(torch.int16).bitwise_not_(), "c", "c"),
        (lambda: torch.cat([TENSORS["a"].flatten(), TENSORS["b"]]), "ab", ""),
        (lambda: torch._foreach_mul_([TENSORS["a"], APART], 2.0), "ac", "ac"),
        (lambda: torch.add(TENSORS["a"], 1, out=BUFFER[20:30].view(2, 5)), "ab", "b"),
        (lambda: torch.empty(0).sum(), "", ""),
        (lambda: torch.zeros(3, device="meta") + 1, "", ""),
        (lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,)).coalesce(), "", ""),
    ],
)
def test_watch_when_an_operation_runs_then_it_names_whose_memory_it_touches(
    act: Callable[[], Tensor], reads: str, writes: str
) -> None:
    assert _seen(act, writes_only=False) == set(reads)
    assert _seen(act, writes_only=True) == set(writes)


def test_watch_when_the_answer_is_an_error_then_the_operation_does_not_run() -> None:
    def refuse(name: str) -> None:
        raise RuntimeError(name)

    before = APART.clone()
    with pytest.raises(RuntimeError, match="c"), Watch(TENSORS, refuse, writes_only=True):
        APART.fill_(7)
    assert torch.equal(APART, before)


def test_watch_when_it_is_left_then_it_sees_nothing_and_can_be_entered_again() -> None:
    seen: list[str] = []
    watch = Watch(TENSORS, seen.append, writes_only=True)
    with watch:
        TENSORS["a"].zero_()
    TENSORS["b"].zero_()
    with watch:
        APART.zero_()
    assert seen == ["a", "c"]
