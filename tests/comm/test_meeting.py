"""Ranks that do not come, come late, or do without the package."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron_distopt.comm import Group, meet, show_presence
from megatron_distopt.errors import RanksDisagreeError
from tests.support.spawn import run_ranks

SIZE = 3
#: Of rank 0 and rank 1: None where the meeting was a success, else the text.
Found = dict[str, str | None]


def _text_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except RanksDisagreeError as error:
        return str(error)
    return None


def meetings(rank: int, size: int) -> Found:
    """Rank 2 is the one that is different; what has been shown stays in the store from case to case."""
    found: Found = {}
    everyone, seconds = Group.of(), {"SECONDS_TO_MEET": 3.0, "SECONDS_TO_SHOW": 1.0, "SECONDS_TO_LOOK": 0.2}
    pair, odd = dist.new_group([0, 2]), rank == 2

    def case(name: str, of_rank_2: Callable[[], object] = bool) -> None:
        found[name] = _text_of(of_rank_2 if odd else lambda: meet(everyone))
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in seconds.items():
            patch.setattr(f"megatron_distopt.comm.agree.{name}", value)
        case("nobody knows why", lambda: meet(everyone) if time.sleep(3.5) is None else None)
        case("all come, nobody has shown anything", lambda: meet(everyone))
        undo = show_presence() if not odd else bool
        dist.barrier()
        case("absent", lambda: meet(everyone) if time.sleep(2.5) is None else None)
        if odd:
            undo = show_presence("MEGATRON_DISTOPT=0")
        dist.barrier()
        case("switched off", lambda: meet(everyone, "no use"))
        undo()
        if odd:
            undo = show_presence()
        case("slow", lambda: meet(everyone) if time.sleep(2.0) is None else None)
        case("without the flag", lambda: meet(everyone, "no flag"))
        case("all come", lambda: meet(everyone))
        found["some of them"] = _text_of(lambda: meet(Group.of(pair))) if rank != 1 else None
        found["some of them, one does without"] = (
            _text_of(lambda: meet(Group.of(pair), "no flag" if odd else "")) if rank != 1 else None
        )
        undo()
    found["undone"] = None if dist.init_process_group.__module__.startswith("torch.") else "not undone"
    return found


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return run_ranks(meetings, SIZE, seconds=90.0)


def _names(rank: int, reason: str, size: int = SIZE) -> str:
    return (
        f"Invalid start-up: megatron_distopt is not used on rank {rank} ({reason}). Must be used on all {size} ranks "
        "or on none. Start every rank with the package installed and with the same flags and variables."
    )


@pytest.mark.parametrize("name", ["all come, nobody has shown anything", "slow", "all come", "some of them", "undone"])
def test_meeting_when_all_come_then_they_go_on(found: list[Found], name: str) -> None:
    assert [each[name] for each in found] == [None] * SIZE


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nobody knows why", "not here after 3 seconds"), ("absent", "not loaded"), ("without the flag", "no flag")],
)
def test_meeting_when_a_rank_is_missing_then_the_others_name_it_with_the_reason(
    found: list[Found], name: str, reason: str
) -> None:
    assert [each[name] for each in found[:2]] == [_names(2, reason)] * 2
    assert found[2][name] in (None, _names(2, reason))


def test_meeting_when_a_rank_has_not_loaded_the_package_then_it_is_waited_for_less_long(found: list[Found]) -> None:
    # Rank 2 comes after 2.5 seconds, before the 3 for which a rank with the package is waited for.
    assert found[0]["absent"] is not None


def test_meeting_when_a_rank_is_switched_off_then_named(found: list[Found]) -> None:
    assert found[0]["switched off"] in (_names(2, "no use"), _names(2, "MEGATRON_DISTOPT=0"))


def test_meeting_when_some_meet_then_messages_have_the_launchers_numbers(found: list[Found]) -> None:
    assert found[0]["some of them, one does without"] == _names(2, "no flag", size=2)
    assert found[2]["some of them, one does without"] is None


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
