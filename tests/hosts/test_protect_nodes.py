"""State from the memory of nodes after workers and whole nodes were killed: network namespaces,
torchrun, plain torch.

Every run is compared, to the bit, with one that nothing happened to.
"""

from __future__ import annotations

import random
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mortal_nodes import MortalNodes, mortal_nodes
from tests.support.node_job import Job, wait_until
from tests.support.nodes import WHY_NOT
from tests.support.protected_training import RESUMED, START, UPDATE, Fault, Plan

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

EVERY, STEPS = 5, 60
PROTECT = {"protect_every": EVERY, "protect_timeout": 6.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[MortalNodes]:
    with mortal_nodes(3) as made:
        yield made


@pytest.fixture(scope="module")
def whole(nodes: MortalNodes, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nothing happens to, with a checkpoint of step 5."""
    plan = Plan(str(tmp_path_factory.mktemp("whole") / "run"), STEPS, save_at=[5])
    return Job(nodes, plan, name="whole").start().end()


#: Where a rank is killed, one start of the run after the other, and the steps from which the next
#: one may go on. A second copy or send is that of a second snapshot, which begins when the first is
#: whole on all ranks.
_PROTECT = "megatron_distopt.checkpoint.protect"
_KILLS = [
    (Fault("kill", number=12, rank=3, argument="10"), {10}),
    (Fault("kill", "megatron_distopt.checkpoint.background:Staging.begin_copy", 2, rank=0), {15}),
    (Fault("kill", f"{_PROTECT}.protection:send_copy", 2, rank=1), {20}),
    (Fault("kill", f"{_PROTECT}.protection:receive_copy", 2, rank=2), {25}),
    (Fault("kill", f"{_PROTECT}.snapshots:Snapshot.commit", 3, rank=2), {30, 35}),
    (Fault("kill", f"{_PROTECT}.restart:take_checked", 1, rank=3), {30, 35}),
    (Fault("kill", RESUMED, 1, rank=0), {30, 35}),
    (Fault("kill", UPDATE, 9, rank=1), {35, 40}),
    (
        Fault("kill", "megatron_distopt.checkpoint.disk:write", 20, rank=0, after=True),
        {35, 40, 45, 50},
    ),
]
_IN_RESUME = 5  # that start has no state


def test_worker_when_killed_in_a_step_a_snapshot_or_a_restart_then_the_run_is_the_same(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    attempts = [[fault] for fault, _ in _KILLS]
    job = Job(nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT, attempts, pause=0.1)).start().end()
    begins = job.begins
    for number, (_, allowed) in enumerate(_KILLS, 1):
        if number != _IN_RESUME:
            assert begins[number][0] == "memory" and begins[number][1] in allowed, (
                number,
                begins,
                job.output,
            )
    assert "resumed at step" in job.output and "resumed: lr" not in job.output
    job.assert_equal(whole)


def test_restored_state_when_one_number_differs_then_the_comparison_sees_it(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    attempts = [
        [Fault("kill", number=12, argument="10")],
        [Fault("spoil", RESUMED, 1, rank=3, argument="0.001")],
    ]
    job = Job(nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT, attempts)).start().end()
    assert job.begins[1] == ("memory", 10)
    with pytest.raises(AssertionError):
        job.assert_equal(whole)


_FILES = "megatron_distopt-*/0/{}-*/*.distcp"


def test_copies_when_damaged_then_the_other_copy_serves_or_the_older_snapshot_or_the_disk(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    """Rank 0 is on node 0, rank 2 on node 1; each node has a copy of all four files."""

    def damage(do: str, what: str, *ranks: int) -> list[Fault]:
        return [Fault(do, START, 1, rank=rank, argument=what) for rank in ranks]

    kill = Fault("kill", number=17, rank=1, argument="15")
    later = replace(kill, number=22, argument="20")
    attempts = [
        [kill],
        [*damage("flip", _FILES.format("0000000015"), 0), later],
        [*damage("cut", _FILES.format("0000000020"), 2), later],
        [*damage("flip", _FILES.format("0000000020"), 0), kill],
        damage("cut", _FILES.format("*"), 0, 2),
    ]
    disk = f"{whole.plan.folder}/disk/5"
    job = Job(nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT, attempts, load=disk)).start().end()
    assert [job.begins[number] for number in range(5)] == [
        ("disk", 5),
        ("memory", 15),
        ("memory", 20),
        ("memory", 15),
        ("disk", 5),
    ], job.output
    told = re.findall(r"(\d+) copies are damaged, for example: .*", job.output)
    assert told == ["4", "4", "8", "16"], told  # one line a start
    assert re.search(r"no snapshot in memory is used; .*step 15", job.output), job.output
    job.assert_equal(whole)


def test_memory_when_full_or_state_not_finite_then_the_older_snapshot_stays(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    attempts = [
        [
            Fault("fill", f"{_PROTECT}.protection:keep_only", 3, rank=2, after=True),  # of step 15
            Fault("kill", number=32, rank=1),
        ],
        [Fault("free", START, 1, rank=2), Fault("kill", number=27, rank=1, argument="25")],
        [
            Fault("spoil", number=29, rank=3, argument="nan"),
            Fault("kill", number=30, rank=1, argument="30"),
        ],
    ]
    job = (
        Job(nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT, attempts, pause=0.05)).start().end()
    )
    assert [job.begins[number] for number in range(4)] == [
        ("nothing", 0),
        ("memory", 10),
        ("memory", 25),
        ("memory", 25),
    ], job.output
    for step in (15, 20, 25, 30):  # each of those for which there was no room
        told = rf"snapshot of step {step} was not kept: .*No space left"
        assert re.search(told, job.output), (step, job.output)
    assert re.search(r"snapshot of step 30 was not kept: .*inf or nan in main", job.output), (
        job.output
    )
    assert any(line.get("step") == 31 for line in job.lines if line["attempt"] == 0)
    job.assert_equal(whole)


def test_memory_when_too_small_then_the_start_says_what_to_type(
    nodes: MortalNodes, tmp_path: Path
) -> None:
    for node in (0, 1):
        nodes.boot(node, "1m")
    job = Job(nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT), restarts=0).start()
    assert re.search(r"protect_folder .*MB free.*--shm-size=", job.fail())
    nodes.kill(0, 1)


def test_folder_when_of_another_model_or_in_use_then_it_is_passed_over_or_refused(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    """Of one name: a job after one that trained another model, and a job beside one that runs. Of
    another: it runs."""
    kill = Fault("kill", number=11, argument="10")
    other = Plan(str(tmp_path / "other"), 12, PROTECT, [[kill]], hidden=128)
    Job(nodes, other, ranks=(1, 1), name="one", restarts=0).start().fail()
    other = replace(other, attempts=[])
    job = Job(nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT, pause=0.5), name="one").start()
    job.wait_for_step(5)
    beside = Job(
        nodes,
        replace(other, folder=str(tmp_path / "beside")),
        (1, 1),
        name="one",
        port=1,
        restarts=0,
    ).start()
    apart = Job(nodes, replace(other, folder=str(tmp_path / "apart")), (1, 1), name="two").start()
    assert re.search(r"in use by another run.*--rdzv-id", beside.fail())
    apart.end()
    job.end()
    assert job.begins[0] == ("nothing", 0), job.output
    assert re.search("no snapshot in memory is used; .*shape", job.output), job.output
    job.assert_equal(whole)


@pytest.mark.parametrize("releases", [True, False])
def test_run_when_it_has_ended_then_the_next_of_its_name_begins_anew_and_says_so(
    releases: bool, nodes: MortalNodes, tmp_path: Path
) -> None:
    new = replace(nodes, forks=False)  # scripts of their own, as torchrun starts them
    first = Plan(str(tmp_path / "first"), 12, PROTECT, releases=releases)
    ended = Job(new, first).start().end()
    assert ended.output.count("this run ended at step 12") == 1, ended.output
    again = Job(new, replace(first, folder=str(tmp_path / "again"))).start().end()
    assert again.begins[0] == ("nothing", 0), again.output
    assert "the run before had ended at step 12" in again.output


def test_run_when_preempted_by_sigterm_then_it_goes_on_from_memory(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    """torchrun hands it on to the script, whose handler leaves by `sys.exit(143)`."""
    new = replace(nodes, forks=False)
    plan = Plan(str(tmp_path / "run"), STEPS, PROTECT, pause=0.2, exits_on_sigterm=True)
    job = Job(new, plan).start()
    job.wait_for_step(17)
    for rank, process in job.processes(0.0).items():
        if rank in (0, 2):  # one of each node
            new.do(rank // 2, f"kill -TERM $(ps -o ppid= -p {process})")
    job.fail()
    job.start().end()
    assert job.begins[1][0] == "memory" and job.begins[1][1] >= 15, job.output
    assert "the run before had ended at step" in job.output and "is not known" in job.output
    job.assert_equal(whole)


def test_run_when_rolled_back_by_hand_then_it_stops_and_says_both_ways_on(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    kill, later = (Fault("kill", number=n + 2, rank=1, argument=str(n)) for n in (20, 25))
    plan = Plan(str(tmp_path / "run"), STEPS, PROTECT, [[kill]], [4, 14], pause=0.1)
    Job(nodes, plan, restarts=0).start().fail()
    plan = replace(plan, attempts=[[later]], save_at=[], loads_first=True)
    disk = f"{plan.folder}/disk"
    newest = replace(plan, folder=str(tmp_path / "newest"), load=f"{disk}/14")
    as_left = Job(nodes, newest, restarts=0).start()
    as_left.fail()
    assert as_left.begins[0] == ("memory", 20), as_left.output
    older = replace(plan, folder=str(tmp_path / "older"), load=f"{disk}/4", attempts=[])
    said = Job(nodes, older, restarts=0).start().fail()
    assert re.search("of 4 updates, .* of 14 updates .*_PROTECT_TAKE=25 .* remove /dev/shm", said)
    assert said.count("MEGATRON_DISTOPT_PROTECT_TAKE=25") >= 4, "not on all ranks"
    take = {**PROTECT, "protect_take": 25}
    taken = Job(nodes, replace(older, folder=str(tmp_path / "taken"), options=take)).start().end()
    assert taken.begins[0] == ("memory", 25)
    taken.assert_equal(whole)


def test_node_when_it_loses_power_and_comes_back_then_its_neighbour_has_its_state(
    nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    """Twice, the second time while it takes its state up again; then both nodes, after which only
    the disk has any."""
    stopped = tmp_path / "stopped"
    attempts = [
        [Fault("stop", f"{_PROTECT}.restart:take_checked", 1, rank=3, argument=str(stopped))]
    ]
    disk = f"{whole.plan.folder}/disk/5"
    job = Job(
        nodes, Plan(str(tmp_path / "run"), STEPS, PROTECT, attempts, load=disk, pause=0.2)
    ).start()
    job.wait_for_step(17)
    job.lose(1)
    job.agents[0].wait_for("ends itself.* on node1 showed no life")
    job.start(1)
    wait_until(stopped.exists, job)
    num_lines = len(job.agents[0].lines)
    job.lose(1)
    job.agents[0].wait_for("ends itself.* on node1 showed no life", since=num_lines)
    job.start(1).wait_for_step(27, begins=1)
    job.lose(0, 1)
    job.start().end()
    assert [source for source, _ in job.begins.values()] == ["disk", "memory", "disk"], job.output
    assert job.begins[1][1] >= 10
    job.assert_equal(whole)


_STORE = """import time, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", {port}, is_master=True, wait_for_workers=False, multi_tenant=True)
time.sleep(1e9)"""


@pytest.mark.parametrize("trains", [True, False])
def test_machine_of_torchruns_store_when_lost_then_memory_serves_once_it_is_back(
    trains: bool, nodes: MortalNodes, whole: Job, tmp_path: Path
) -> None:
    """Node 0. Where it trains nothing, training goes on until the next loss."""
    plan = Plan(str(tmp_path / "run"), STEPS, PROTECT, pause=0.2)
    job, others = (
        Job(nodes, plan, (2, 2) if trains else (0, 2, 2), "2:2"),
        [1] if trains else [1, 2],
    )

    def start() -> None:
        nodes.boot(0)
        if not trains:
            nodes.do(
                0,
                f"{shlex.join([sys.executable, '-c', _STORE.format(port=job.endpoint)])} > "
                "/dev/null 2>&1 &",
            )
        job.start(*others, *([0] if trains else []))

    start()
    job.wait_for_step(12)
    job.lose(0)
    if not trains:
        job.wait_for_step(22)
        nodes.do(1, f"kill -9 {job.processes(0.0)[0]}")
    job.agents[others[-1]].wait_for("ends itself|Error")
    time.sleep(6.0)
    assert len(job.begins) == 1
    for node in others:
        nodes.do(node, "kill -9 -1")  # all that torchrun has started
    start()
    job.end()
    assert job.begins[1][0] == "memory" and job.begins[1][1] >= (10 if trains else 20), job.output
    job.assert_equal(whole)


def test_nodes_when_three_then_two_lost_cost_the_disk_and_one_for_good_a_smaller_run(
    nodes: MortalNodes, tmp_path: Path
) -> None:
    """The copies of rank 2 are on nodes 1 and 2. Later node 2 stays away for a while."""
    plan = Plan(str(tmp_path / "four"), STEPS, save_at=list(range(EVERY, STEPS, EVERY)))
    four = Job(nodes, plan, (2, 1, 1), name="four").start().end()
    protected = replace(plan, folder=str(tmp_path / "run"), options=PROTECT, save_at=[], pause=0.2)
    job = Job(nodes, replace(protected, load=f"{plan.folder}/disk/5"), (2, 1, 1), "1:3").start()
    job.wait_for_step(12)
    job.lose(1, 2)
    job.start(1, 2).wait_for_step(17, begins=1)
    job.lose(2)
    job.wait_for_step(32, begins=2)
    job.start(2).end()
    sources = [source for source, _ in job.begins.values()]
    assert sources == ["disk", "disk", "memory", "memory"], job.output
    assert "no whole copy of rank 2." in job.agents[0].output
    first, second = (job.begins[number][1] for number in (2, 3))
    assert 10 <= first < 20 < second
    smaller = replace(plan, folder=str(tmp_path / "three"), load=f"{plan.folder}/disk/{first}")
    three = Job(nodes, smaller, (2, 1), name="three").start().end()
    again = replace(plan, folder=str(tmp_path / "again"), load=f"{smaller.folder}/disk/{second}")
    rest = Job(nodes, again, (2, 1, 1), name="again").start().end()
    expected = {step: four.curve[step] for step in range(6, first + 1)} | three.curve | rest.curve
    assert job.curve == expected
    assert job.checksums == rest.checksums


def test_run_when_fifty_workers_and_nodes_are_killed_then_it_is_the_same(
    nodes: MortalNodes, tmp_path: Path
) -> None:
    plan = Plan(str(tmp_path / "whole"), 450)
    expected = Job(nodes, plan, name="unkilled").start().end()
    plan = replace(plan, folder=str(tmp_path / "run"), options=PROTECT, pause=0.1, waits=False)
    job, draw = Job(nodes, plan, restarts=100).start(), random.Random(0)
    killed_at = 0.0
    for _ in range(50):
        wait_until(lambda since=killed_at: len(job.processes(since)) == 4, job)
        time.sleep(draw.uniform(0.0, 2.0))
        processes, killed_at = job.processes(killed_at), time.time()
        if draw.random() < 0.2:
            job.lose(1)
            job.start(1)
        else:
            rank = draw.randrange(4)
            nodes.do(rank // 2, f"kill -9 {processes[rank]}")
    job.end(300)
    assert sum(source == "memory" for source, _ in job.begins.values()) > 40
    job.assert_equal(expected)
