"""Ranks that must agree, and the collectives in place, on three ranks and on a group of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm import Field, Group, compare, exchange, raise_together, share_initial, sum_over
from megatron_distopt.comm.collectives import all_gather, reduce_scatter
from megatron_distopt.errors import ConfigError, RanksDisagreeError
from tests.support.spawn import run_ranks

SIZE = 3

Raised = tuple[str, str] | None


def raised(call: Callable[[], object]) -> Raised:
    """Class and text of what it raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test says which one it must be
        return type(error).__name__, str(error)
    return None


def _fail(error: Exception) -> object:
    raise error


def _foreign(rank: int, everyone: Group, record: object) -> Raised:
    """Rank 1 is in an exchange of somebody else's, the others are in ours."""
    if rank == 1:
        dist.all_gather_object([None] * SIZE, record)
        return None
    return raised(lambda: exchange(rank, everyone))


def _together(everyone: Group, errors: dict[int, Exception]) -> Raised:
    error = errors.get(everyone.rank)
    return raised(lambda: raise_together(lambda: everyone.rank if error is None else _fail(error), everyone))


def _compare(everyone: Group, *fields: tuple[str, ...]) -> Raised:
    return raised(lambda: compare([Field(f"field {index}", items) for index, items in enumerate(fields)], everyone))


def _agree(rank: int, everyone: Group) -> dict[str, Any]:
    odd = rank == 1
    return {
        "exchanged": exchange(("value", rank), everyone),
        "foreign text": _foreign(rank, everyone, "somebody else's"),
        "foreign pair": _foreign(rank, everyone, ("another package", 1)),
        "foreign none": _foreign(rank, everyone, None),
        "all pass": raise_together(lambda: rank, everyone),
        "one fails": _together(everyone, {1: ZeroDivisionError("division by zero")}),
        "one fails without a text": _together(everyone, {2: KeyError()}),
        "one refuses": _together(everyone, {0: ConfigError("no good")}),
        "two fail": _together(everyone, {1: OSError("first"), 2: ValueError("second")}),
        "equal": _compare(everyone, ("a", "b"), ()),
        "first item": _compare(everyone, ("a",), ("b", "x" if odd else "c", "y" if odd else "d")),
        "shorter": _compare(everyone, ("a",) if odd else ("a", "b")),
        "longer": _compare(everyone, ("a", "b") if odd else ("a",)),
        "minority of rank 0": _compare(everyone, ("x",) if rank == 0 else ("a",)),
        "all differ": _compare(everyone, (f"of {rank}",)),
        "two fields": _compare(everyone, ("x" if rank == 2 else "a",), ("y" if odd else "a",)),
        "one item with a comma or two": _compare(everyone, ("a,b",) if odd else ("a", "b")),
        "after all of it": exchange(rank, everyone),
    }


def _on_group(group: Group, start: float) -> dict[str, Any]:
    """Each in place; a shard is a view of its bucket, as in a buffer."""
    numel = 2

    def bucket_and_shard() -> tuple[Tensor, Tensor]:
        bucket = torch.arange(float(numel * group.size)) + start
        return bucket, bucket[group.rank * numel : (group.rank + 1) * numel]

    scattered, shard = bucket_and_shard()
    reduce_scatter(scattered, shard, group)
    gathered, part = bucket_and_shard()
    gathered.zero_()
    part.fill_(start)
    all_gather(gathered, part, group)
    sent = torch.full((3,), start)
    share_initial([sent], group, sent.device)
    summed = torch.tensor([start, 1.0])
    sum_over(summed, group)
    return {
        "scattered": shard.tolist(),
        "gathered": gathered.tolist(),
        "broadcast": sent.tolist(),
        "summed": summed.tolist(),
    }


def run_all(rank: int, size: int) -> dict[str, Any]:
    everyone = Group.of()
    handles = [dist.new_group([each]) for each in range(size)]
    pair = dist.new_group([1, 2])
    start = 10.0 * (rank + 1)
    return {
        **_agree(rank, everyone),
        "all": _on_group(everyone, start),
        "alone": _on_group(Group.of(handles[rank]), start),
        "pair": _on_group(Group.of(pair), start) if rank else None,
        "alone agrees": (
            exchange("mine", Group.of(handles[rank])),
            _together(Group.of(handles[rank]), {0: ValueError("own")}),
            _compare(Group.of(handles[rank]), (f"of {rank}",)),
        ),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(run_all, SIZE)


def by_rank(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [of_rank[name] for of_rank in found]


def stopped(rank: int, text: str) -> tuple[str, str]:
    """What the others say of a rank that refused."""
    return (
        "RanksDisagreeError",
        f"Invalid start-up: rank {rank} refused with «{text}». Must pass on all 3 ranks. Mend what that rank reports.",
    )


def test_exchange_when_all_ranks_are_in_it_then_everybodys_value_by_rank(found: list[dict[str, Any]]) -> None:
    assert by_rank(found, "exchanged") == [[("value", 0), ("value", 1), ("value", 2)]] * SIZE
    assert by_rank(found, "after all of it") == [[0, 1, 2]] * SIZE


@pytest.mark.parametrize("record", ["text", "pair", "none"])
def test_exchange_when_a_rank_is_in_a_foreign_one_then_the_others_name_it(
    record: str, found: list[dict[str, Any]]
) -> None:
    error = (
        RanksDisagreeError.__name__,
        "Invalid start-up: rank 1 does not run megatron_distopt here. Must run it on all 3 ranks. "
        "Start every rank with the same flags and variables.",
    )
    assert by_rank(found, f"foreign {record}") == [error, None, error]


def test_raise_together_when_all_pass_then_each_has_its_own_value(found: list[dict[str, Any]]) -> None:
    assert by_rank(found, "all pass") == [0, 1, 2]


def test_raise_together_when_one_rank_raises_anything_then_it_gets_its_own_and_the_others_its_text(
    found: list[dict[str, Any]],
) -> None:
    own = ("ZeroDivisionError", "division by zero")
    assert by_rank(found, "one fails") == [stopped(1, "division by zero"), own, stopped(1, "division by zero")]
    assert by_rank(found, "one refuses") == [("ConfigError", "no good"), *[stopped(0, "no good")] * 2]


def test_raise_together_when_the_exception_has_no_text_then_the_others_read_its_class(
    found: list[dict[str, Any]],
) -> None:
    assert by_rank(found, "one fails without a text") == [*[stopped(2, "KeyError")] * 2, ("KeyError", "")]


def test_raise_together_when_two_ranks_raise_then_the_others_name_the_first(found: list[dict[str, Any]]) -> None:
    assert by_rank(found, "two fail") == [stopped(1, "first"), ("OSError", "first"), ("ValueError", "second")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "first item",
            "Invalid field 1: rank 1 has x as number 1 where rank 0 has c. Must be the same on all 3 ranks. "
            "Start rank(s) 1 with the code and options of the others.",
        ),
        (
            "shorter",
            "Invalid field 0: rank 1 has nothing as number 1 where rank 0 has b. Must be the same on all 3 ranks. "
            "Start rank(s) 1 with the code and options of the others.",
        ),
        (
            "longer",
            "Invalid field 0: rank 1 has b as number 1 where rank 0 has nothing. Must be the same on all 3 ranks. "
            "Start rank(s) 1 with the code and options of the others.",
        ),
        (
            "minority of rank 0",
            "Invalid field 0: rank 0 has x as number 0 where rank 1 has a. Must be the same on all 3 ranks. "
            "Start rank(s) 0 with the code and options of the others.",
        ),
        (
            "all differ",
            "Invalid field 0: rank 1 has of 1 as number 0 where rank 0 has of 0. Must be the same on all 3 ranks. "
            "Start rank(s) 1, 2 with the code and options of the others.",
        ),
        (
            "two fields",
            "Invalid field 0: rank 2 has x as number 0 where rank 0 has a. Must be the same on all 3 ranks. "
            "Start rank(s) 2 with the code and options of the others.",
        ),
        (
            "one item with a comma or two",
            "Invalid field 0: rank 1 has a,b as number 0 where rank 0 has a. Must be the same on all 3 ranks. "
            "Start rank(s) 1 with the code and options of the others.",
        ),
    ],
)
def test_compare_when_ranks_differ_then_all_name_the_first_difference_and_the_minority(
    name: str, text: str, found: list[dict[str, Any]]
) -> None:
    assert by_rank(found, name) == [("RanksDisagreeError", text)] * SIZE


def test_compare_when_all_fields_are_equal_then_nothing_is_raised(found: list[dict[str, Any]]) -> None:
    assert by_rank(found, "equal") == [None] * SIZE


def test_collectives_when_three_ranks_then_each_in_place_has_the_exact_values(found: list[dict[str, Any]]) -> None:
    # Buckets 0..5 plus 10, 20 and 30: their sum is 60 + 3 * index.
    assert [each["scattered"] for each in by_rank(found, "all")] == [[60.0, 63.0], [66.0, 69.0], [72.0, 75.0]]
    for each in by_rank(found, "all"):
        assert each["gathered"] == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]
        assert each["broadcast"] == [10.0] * 3
        assert each["summed"] == [60.0, 3.0]


def test_collectives_when_the_group_is_a_part_of_the_ranks_then_its_own_rank_0_is_the_first(
    found: list[dict[str, Any]],
) -> None:
    assert [each["scattered"] for each in by_rank(found, "pair")[1:]] == [[50.0, 52.0], [54.0, 56.0]]
    for each in by_rank(found, "pair")[1:]:
        assert each["gathered"] == [20.0, 20.0, 30.0, 30.0]
        assert each["broadcast"] == [20.0] * 3
        assert each["summed"] == [50.0, 2.0]


@pytest.mark.parametrize("rank", range(SIZE))
def test_collectives_when_the_group_has_one_rank_then_nothing_changes(rank: int, found: list[dict[str, Any]]) -> None:
    start = 10.0 * (rank + 1)
    assert found[rank]["alone"] == {
        "scattered": [start, start + 1],
        "gathered": [start, start],
        "broadcast": [start] * 3,
        "summed": [start, 1.0],
    }


def test_agreement_when_the_group_has_one_rank_then_it_agrees_with_itself(found: list[dict[str, Any]]) -> None:
    assert by_rank(found, "alone agrees") == [(["mine"], ("ValueError", "own"), None)] * SIZE
