"""Host memory that a save and a load take beside the state: one tensor, however large the state
is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_distopt.checkpoint import load_checkpoint, save_checkpoint
from megatron_distopt.comm import Group
from tests.support.facts import Facts, facts_of
from tests.support.simulated import Param, World, small_model

#: Main params and two moments of 8 params of 2**20 elements: 96 MiB; the largest tensor has 4 of
#: them.
NUM_PARAMS, TENSOR_NBYTES = 8, 4 << 20
STATE_NBYTES = 3 * NUM_PARAMS * TENSOR_NBYTES
#: A buffer of 1 MiB before the disk, a piece of 1 MiB for checksums, and the manifest's objects; a
#: second tensor in memory would be 4 MiB more.
SLACK_NBYTES = 3 << 20
_CLEAR_REFS = Path("/proc/self/clear_refs")


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:"))
        * 1024
    )


def extra_nbytes(action: Callable[[], object]) -> int:
    """The most that the process held while it ran, above what it held before."""
    _CLEAR_REFS.write_text("5", encoding="utf-8")
    before = status("VmRSS")
    result = action()
    most = status("VmHWM") - before
    del result
    return most


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, int]:
    """In a process of its own: nothing was allocated and freed before that could be used again
    unseen."""
    # What is freed goes back to the system at once, so that it is counted again when it is needed
    # again.
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16) == 1, "M_MMAP_THRESHOLD"
    one_rank = Group(None, 0, 1)
    params = tuple(Param(f"w{number}", (1024, 1024), dim=0) for number in range(NUM_PARAMS - 1))
    # its two parts do not lie in one piece
    params += (Param("column", (1024, 1024), dim=1, stride=2),)
    small, world = World.of(small_model(1)), World.of(params)
    fresh = World.of(params, filled=False)
    save_checkpoint(folder / "small", small.ranks[0].model, one_rank)
    load_checkpoint(folder / "small", small.ranks[0].model, one_rank)
    model, path = world.ranks[0].model, folder / "large"
    return {
        "known": extra_nbytes(lambda: torch.ones(10 << 20, dtype=torch.uint8)),
        "save": extra_nbytes(lambda: save_checkpoint(path, model, one_rank)),
        "save again": extra_nbytes(lambda: save_checkpoint(path, model, one_rank)),
        "load": extra_nbytes(lambda: load_checkpoint(path, model, one_rank)),
        "load fresh": extra_nbytes(lambda: load_checkpoint(path, fresh.ranks[0].model, one_rank)),
    }


def skip_where_nothing_is_measured() -> None:
    if not _CLEAR_REFS.exists():
        pytest.skip("needs Linux to say the most memory that a process held")


facts = facts_of(collect_facts, 1, before=skip_where_nothing_is_measured)


@pytest.fixture(scope="module")
def measured(facts: Facts) -> dict[str, int]:
    (found,) = facts.by_rank
    assert 10 << 20 <= found["known"] <= 11 << 20, "the measure itself is off"
    return found


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="a save holds more before torch 2.10"
)
@pytest.mark.parametrize("action", ["save", "save again", "load"])
def test_memory_when_the_state_is_there_then_at_most_one_tensor_comes_on_top(
    measured: dict[str, int], action: str
) -> None:
    assert measured[action] <= TENSOR_NBYTES + SLACK_NBYTES < STATE_NBYTES / 10


def test_memory_when_a_fresh_run_loads_then_the_moments_and_one_tensor_come_on_top(
    measured: dict[str, int],
) -> None:
    moments_nbytes = 2 * NUM_PARAMS * TENSOR_NBYTES
    assert moments_nbytes <= measured["load fresh"] <= moments_nbytes + TENSOR_NBYTES + SLACK_NBYTES
