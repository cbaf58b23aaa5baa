"""Ranks that must agree, and meet before their first collective: three ranks, and a group of
one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.comm import (
    Field,
    Group,
    all_gather_objects,
    backend_of,
    compare,
    meet,
    raise_together,
    show_presence,
)
from megatron_distopt.errors import ConfigError
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_mentions, raised

SIZE = 3

Raised = tuple[str, str]
NOTHING = ("nothing", "")


def _fail(error: Exception) -> object:
    raise error


def _foreign(rank: int, everyone: Group, record: object) -> Raised:
    """Rank 1 is in an exchange of somebody else's, the others are in ours."""
    if rank == 1:
        dist.all_gather_object([None] * SIZE, record)
        return NOTHING
    return raised(lambda: all_gather_objects(rank, everyone))


def _together(everyone: Group, errors: dict[int, Exception]) -> Raised:
    error = errors.get(everyone.rank)
    return raised(
        lambda: raise_together(lambda: everyone.rank if error is None else _fail(error), everyone)
    )


def _compare(everyone: Group, *fields: tuple[str, ...]) -> Raised:
    return raised(
        lambda: compare(
            [Field(f"field {index}", items) for index, items in enumerate(fields)], everyone
        )
    )


def _agree(rank: int, everyone: Group) -> dict[str, Any]:
    odd = rank == 1
    return {
        "exchanged": all_gather_objects(("value", rank), everyone),
        "foreign text": _foreign(rank, everyone, "somebody else's"),
        "foreign none": _foreign(rank, everyone, None),
        "all pass": raise_together(lambda: rank, everyone),
        "one fails": _together(everyone, {1: ZeroDivisionError("division by zero")}),
        "one fails without a text": _together(everyone, {2: KeyError()}),
        "one refuses": _together(everyone, {0: ConfigError("no good")}),
        "two fail": _together(everyone, {1: OSError("first"), 2: ValueError("second")}),
        "equal": _compare(everyone, ("a", "b"), ()),
        "first item": _compare(everyone, ("a",), ("b", "x" if odd else "c", "y" if odd else "d")),
        "shorter": _compare(everyone, ("a",) if odd else ("a", "b")),
        "minority of rank 0": _compare(everyone, ("x",) if rank == 0 else ("a",)),
        "all differ": _compare(everyone, (f"of {rank}",)),
        "two fields": _compare(everyone, ("x" if rank == 2 else "a",), ("y" if odd else "a",)),
        "one item with a comma or two": _compare(everyone, ("a,b",) if odd else ("a", "b")),
        "after all of it": all_gather_objects(rank, everyone),
    }


def meetings(rank: int, size: int) -> dict[str, str]:
    """Rank 2 is the one that is different; what has been shown stays in the store from case to
    case."""
    found: dict[str, str] = {}
    everyone, seconds = (
        Group.of(),
        {"SECONDS_TO_MEET": 1.8, "SECONDS_TO_SHOW": 0.5, "SECONDS_TO_LOOK": 0.1},
    )
    pair, odd = dist.new_group([0, 2]), rank == 2

    def case(name: str, of_rank_2: Callable[[], object] = bool) -> None:
        _, found[name] = raised(of_rank_2 if odd else lambda: meet(everyone))
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in seconds.items():
            patch.setattr(f"megatron_distopt.comm.meeting.{name}", value)
        case("nobody knows why", lambda: meet(everyone) if time.sleep(2.6) is None else None)
        case("all come, nobody has shown anything", lambda: meet(everyone))
        undo = show_presence() if not odd else bool
        dist.barrier()
        case("absent", lambda: meet(everyone) if time.sleep(1.8) is None else None)
        if odd:
            undo = show_presence("MEGATRON_DISTOPT=0")
        dist.barrier()
        case("switched off", lambda: meet(everyone, "no use"))
        undo()
        if odd:
            undo = show_presence()
        case("slow", lambda: meet(everyone) if time.sleep(1.3) is None else None)
        case("without the flag", lambda: meet(everyone, "no flag"))
        case("all come", lambda: meet(everyone))
        for name, reason in {
            "some of them": "",
            "some of them, one does without": "no flag" if odd else "",
        }.items():
            _, found[name] = (
                raised(lambda why=reason: meet(Group.of(pair), why)) if rank != 1 else NOTHING
            )
        undo()
    found["undone"] = (
        "" if dist.init_process_group.__module__.startswith("torch.") else "not undone"
    )
    return found


#: Before torch 2.10 gloo takes up to a minute to end a group that is destroyed.
REMAKES = hasattr(torch.Tensor, "grad_dtype")


class _Remade(dist.ProcessGroup):
    """What slime and miles put around a group, to destroy it between two phases and to make it
    again."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group: dist.ProcessGroup | None = group


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    """As they replace torch's functions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(each.group if isinstance(each, _Remade) else each for each in args)
        return function(
            *args, **{key: each.group if key == "group" else each for key, each in kwargs.items()}
        )

    return call


def _remake() -> dict[str, Any]:
    wrapped = _Remade(dist.new_group())
    found: dict[str, Any] = {
        "unknown group": raised(lambda: backend_of(torch.device("cpu"), Group(wrapped, 0, SIZE)))
    }
    with ExitStack() as stack:
        for name in ("get_rank", "get_world_size", "get_backend", "all_gather_object"):
            stack.enter_context(mock.patch.object(dist, name, _known(getattr(dist, name))))
        found["remade"] = []
        for _ in range(2):
            group = Group.of(wrapped)
            found["remade"].append(
                (backend_of(torch.device("cpu"), group), all_gather_objects(group.rank, group))
            )
            dist.destroy_process_group(wrapped.group)
            wrapped.group = None
            found["destroyed group"] = raised(lambda: Group.of(wrapped))
            wrapped.group = dist.new_group()
    return found


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    everyone, alone = Group.of(), Group.of([dist.new_group([each]) for each in range(size)][rank])
    return {
        **_agree(rank, everyone),
        **(_remake() if REMAKES else {}),
        "alone": (
            all_gather_objects("mine", alone),
            _together(alone, {0: ValueError("own")}),
            _compare(alone, (f"of {rank}",)),
        ),
        **meetings(rank, size),
    }


facts = facts_of(collect_facts, SIZE, seconds=90.0)


@pytest.mark.skipif(not REMAKES, reason="gloo ends slowly before torch 2.10")
def test_group_when_a_framework_destroys_it_and_makes_it_again_then_it_works_or_says_so(
    facts: Facts,
) -> None:
    assert facts["remade"] == [[("gloo", [0, 1, 2])] * 2] * SIZE
    for of_rank in facts.by_rank:
        for name, says in (
            ("unknown group", "patch of torch.distributed"),
            ("destroyed group", "groups again"),
        ):
            kind, text = of_rank[name]
            assert kind == "ConfigError"
            assert says in text


def test_exchange_when_all_ranks_are_in_it_then_everybodys_value_by_rank(facts: Facts) -> None:
    assert facts["exchanged"] == [[("value", 0), ("value", 1), ("value", 2)]] * SIZE
    assert facts["after all of it"] == [[0, 1, 2]] * SIZE


@pytest.mark.parametrize("record", ["text", "none"])
def test_exchange_when_a_rank_is_in_a_foreign_one_then_the_others_name_it(
    record: str, facts: Facts
) -> None:
    first, foreign, last = facts[f"foreign {record}"]
    assert (foreign, first) == (NOTHING, last)
    assert first[0] == "RanksDisagreeError"
    assert_mentions(
        first[1], "Rank 1 does not run megatron_distopt here", "the same flags and variables"
    )


def test_raise_together_when_all_pass_then_each_has_its_own_value(facts: Facts) -> None:
    assert facts["all pass"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "rank", "text", "own"),
    [
        ("one fails", 1, "division by zero", {1: ("ZeroDivisionError", "division by zero")}),
        ("one fails without a text", 2, "KeyError", {2: ("KeyError", "")}),
        ("one refuses", 0, "no good", {0: ("ConfigError", "no good")}),
        ("two fail", 1, "first", {1: ("OSError", "first"), 2: ("ValueError", "second")}),
    ],
)
def test_raise_together_when_a_rank_raises_then_the_others_get_the_first_text(
    name: str, rank: int, text: str, own: dict[int, Raised], facts: Facts
) -> None:
    for number, error in enumerate(facts[name]):
        if number in own:
            assert error == own[number]
        else:
            assert error[0] == "RanksDisagreeError"
            assert_mentions(error[1], f"rank {rank} raised «{text}»")


@pytest.mark.parametrize(
    ("name", "field", "got", "odd"),
    [
        ("first item", 1, "rank 1 has x as item 1 where rank 0 has c", "1"),
        ("shorter", 0, "rank 1 has nothing as item 1 where rank 0 has b", "1"),
        ("minority of rank 0", 0, "rank 0 has x as item 0 where rank 1 has a", "0"),
        ("all differ", 0, "rank 1 has of 1 as item 0 where rank 0 has of 0", "1, 2"),
        ("two fields", 0, "rank 2 has x as item 0 where rank 0 has a", "2"),
        ("one item with a comma or two", 0, "rank 1 has a,b as item 0 where rank 0 has a", "1"),
    ],
)
def test_compare_when_ranks_differ_then_all_name_the_first_difference_and_the_minority(
    name: str, field: int, got: str, odd: str, facts: Facts
) -> None:
    for error, text in facts[name]:
        assert error == "RanksDisagreeError"
        assert_mentions(text, f"field {field}", got, "all 3 ranks", f"Start rank(s) {odd} with")


def test_compare_when_all_fields_are_equal_then_nothing_is_raised(facts: Facts) -> None:
    assert facts["equal"] == [NOTHING] * SIZE


def test_agreement_when_the_group_has_one_rank_then_it_agrees_with_itself(facts: Facts) -> None:
    assert facts["alone"] == [(["mine"], ("ValueError", "own"), NOTHING)] * SIZE


# --- ranks that do not come, come late, or do without the package


def _names(rank: int, reason: str, size: int = SIZE) -> str:
    return (
        f"megatron_distopt is not used on rank {rank} ({reason}). Either all {size} ranks must "
        "use it or none. Start every rank with the package installed and with the same flags and "
        "variables."
    )


@pytest.mark.parametrize(
    "name", ["all come, nobody has shown anything", "slow", "all come", "some of them", "undone"]
)
def test_meeting_when_all_come_then_they_go_on(facts: Facts, name: str) -> None:
    assert facts[name] == [""] * SIZE


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody knows why", "not here after 2 seconds"),
        ("absent", "not loaded"),
        ("without the flag", "no flag"),
    ],
)
def test_meeting_when_a_rank_is_missing_then_the_others_name_it_with_the_reason(
    facts: Facts, name: str, reason: str
) -> None:
    # A store in a file waits for whole seconds. Absent: rank 2 comes after 1.8, when the others
    # have looked once.
    assert [each[name] for each in facts.by_rank[:2]] == [_names(2, reason)] * 2
    assert facts[name][2] in ("", _names(2, reason))


def test_meeting_when_a_rank_is_switched_off_then_named(facts: Facts) -> None:
    assert facts.first["switched off"] in (_names(2, "no use"), _names(2, "MEGATRON_DISTOPT=0"))


def test_meeting_when_some_meet_then_messages_have_the_launchers_numbers(facts: Facts) -> None:
    assert facts.first["some of them, one does without"] == _names(2, "no flag", size=2)
    assert facts["some of them, one does without"][2] == ""


def test_presence_when_the_process_group_comes_later_then_it_is_shown_then() -> None:
    before, store = dist.init_process_group, dist.HashStore()
    undo = show_presence("no use")
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        shown = dist.distributed_c10d._get_default_store().get("megatron_distopt/presence of 0")
    finally:
        dist.destroy_process_group()
        undo()
    assert shown == b"no use"
    assert dist.init_process_group is before


def test_presence_when_other_code_has_wrapped_the_function_since_then_the_undo_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dist.init_process_group
    undo = show_presence()
    theirs = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", theirs)
    undo()
    assert dist.init_process_group is theirs
    monkeypatch.undo()
    dist.init_process_group = before
