"""Three ranks that make a public call together, late, instead of another one, or not at all.

The store is torch's over TCP, which waits for fractions of a second, and not that of the ranks.
"""

from __future__ import annotations

import ast
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import megatron_distopt
from megatron_distopt.comm import Group, meet_in_call
from megatron_distopt.comm.groups import FAKE
from megatron_distopt.errors import AccessError
from tests.support.facts import Facts, facts_of
from tests.support.forked import text_in_fork
from tests.support.refusals import assert_mentions, raised

SIZE = 3
#: Between two looks, and of the group whose time limit passes.
SECONDS, LIMIT = 0.05, 0.4

NOTHING = ("nothing", "")
REMEDY = "Call it on all 3 ranks, outside of any 'if rank == 0'."


def _open_store(rank: int) -> dist.Store:
    """Collective: one that the first rank serves."""
    told: list[Any] = [None]
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            told[0] = probe.getsockname()[1]
        served = dist.TCPStore("127.0.0.1", told[0], is_master=True, wait_for_workers=False)
        dist.broadcast_object_list(told, src=0)
        return served
    dist.broadcast_object_list(told, src=0)
    return dist.TCPStore("127.0.0.1", told[0], is_master=False, wait_for_workers=False)


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    everyone, store, lines = Group.of(), _open_store(rank), list[str]()
    pair = dist.new_group([0, 2])
    short = Group.of(dist.new_group(timeout=timedelta(seconds=LIMIT)))
    found: dict[str, Any] = {}

    def note(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        store.set(f"line {len(lines)} of rank {rank}", "")

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    logging.getLogger("megatron_distopt").addHandler(handler)

    def case(name: str, act: Callable[[], object]) -> None:
        lines.clear()
        found[name] = raised(act)
        dist.barrier()
        found[f"{name}: lines"] = list(lines)

    def late() -> None:
        if rank != 1:
            store.wait([f"line {1 + rank // 2} of rank 1"], timedelta(seconds=60))
        time.sleep(10 * SECONDS)  # in which the same line is not written again
        meet_in_call("save", everyone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_distopt.comm.meeting.SECONDS_TO_LOOK", SECONDS)
        patch.setattr("megatron_distopt.comm.meeting.default_store", lambda: store)
        case("all", lambda: [meet_in_call("save", everyone) for _ in range(20)])
        case("late", late)
        case("other", lambda: meet_in_call("load" if rank == 1 else "save", everyone))
        case("after that", lambda: [meet_in_call(each, everyone) for each in ("save", "load")])
        case("alone", lambda: rank == 2 and meet_in_call("full_grad", short))
        case("after the limit", lambda: meet_in_call("full_grad", short))
        case("pair", lambda: rank != 1 and meet_in_call("save", Group.of(pair)))
        found["fork"] = text_in_fork(lambda: raised(lambda: meet_in_call("save", everyone))[0])
        dist.barrier()
        keys = store.num_keys() if rank == 0 else 0
        case("many", lambda: [meet_in_call("save", everyone) for _ in range(50)])
        found["keys"] = store.num_keys() - keys if rank == 0 else 0
        dist.barrier()
        if rank == 0:  # the others end
            found["ended"] = raised(lambda: meet_in_call("resume", everyone))
    return found


facts = facts_of(collect_facts, SIZE, seconds=90.0)


@pytest.mark.parametrize("name", ["all", "late", "after that", "after the limit", "pair", "many"])
def test_call_when_all_ranks_make_it_then_they_go_on(facts: Facts, name: str) -> None:
    assert facts[name] == [NOTHING] * SIZE


def test_call_when_ranks_are_late_then_the_first_one_names_them_in_a_line_each_time_once(
    facts: Facts,
) -> None:
    first, second, third = facts["late: lines"]
    assert second == [
        f"save() was called on rank 1, but not on {missing}. {REMEDY}"
        for missing in ("rank 0 (not yet), rank 2 (not yet)", "rank 2 (not yet)")
    ]
    assert first == third == []
    assert facts["all: lines"] == [[]] * SIZE


def test_call_when_a_rank_is_in_another_one_then_all_raise_and_the_next_call_works(
    facts: Facts,
) -> None:
    texts = [text for _, text in facts["other"]]
    assert [kind for kind, _ in facts["other"]] == ["RanksDisagreeError"] * SIZE
    assert_mentions(texts[1], "load() was called on rank 1", "rank 0 (in save())", REMEDY)
    assert texts[0] == texts[2]
    assert_mentions(texts[0], "save() was called on rank", "rank 1 (in load())", REMEDY)


def test_call_when_it_is_made_on_one_rank_then_error_at_the_time_limit_of_the_group(
    facts: Facts,
) -> None:
    *others, (kind, text) = facts["alone"]
    assert others == [NOTHING] * 2
    assert kind == "RanksDisagreeError"
    parts = ("full_grad() was called on rank 2", "rank 0 (not within ", "rank 1 (not within")
    assert_mentions(text, *parts, REMEDY)


def test_call_when_the_other_ranks_have_ended_then_error(facts: Facts) -> None:
    kind, text = facts.first["ended"]
    assert kind == "RanksDisagreeError"
    assert_mentions(text, "resume() was called on rank 0", "(ended)", REMEDY)


def test_call_when_it_is_made_in_a_forked_process_then_error(facts: Facts) -> None:
    assert facts["fork"] == [AccessError.__name__] * SIZE


def test_call_when_it_is_made_often_then_the_store_does_not_grow(facts: Facts) -> None:
    assert facts.first["keys"] == 0


def test_call_when_ranks_do_not_exist_then_nobody_is_waited_for() -> None:
    group = mock.Mock(size=4, backend=FAKE)
    meet_in_call("save", group)


# --- which calls meet

PACKAGE = Path(megatron_distopt.__file__).parent
#: Classes with what users call, which are read and not imported: they need their hosts.
CLASSES = {
    "session/session_calls.py": "SessionCalls",
    "hosts/torch/optimizer.py": "TorchDistributedOptimizer",
    "hosts/megatron_core/core_calls.py": "CoreCalls",
    "hosts/megatron_2023/optimizer.py": "DistributedOptimizer",
}
#: Collective calls of every step; those in whose bodies ranks meet, as there not every call is
#: collective; and one that users do not call.
EXCEPT = {"step", "clip_grad_norm_"} | {"protect", "add_param_group", "finish_saving"}
#: Calls of the hosts' loops in every step, and one that starts an optimizer.
EXCEPT |= {"reduce_model_grads", "gather_model_params", "prepare_grads", "step_with_ready_grads"}
EXCEPT |= {"started"}


@pytest.mark.parametrize("file", CLASSES)
def test_optimizer_when_a_call_is_collective_then_all_ranks_meet_in_it(file: str) -> None:
    classes = list(ast.walk(ast.parse((PACKAGE / file).read_text())))
    methods = [
        method
        for node in classes
        if isinstance(node, ast.ClassDef) and node.name == CLASSES[file]
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    ]
    collective = {
        method.name: [ast.unparse(each) for each in method.decorator_list]
        for method in methods
        if (ast.get_docstring(method) or "").startswith("Collective:")
    }
    assert collective
    alone = [name for name, found in collective.items() if "on_all_ranks" not in found]
    assert set(alone) <= EXCEPT
