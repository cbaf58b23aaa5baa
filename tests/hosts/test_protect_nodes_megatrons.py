"""State from the memory of two nodes under the training scripts of Megatrons, after workers and
nodes were killed.

Namespaces, torchrun, two ranks on each node, of which two hold one copy of the model. Runs are
compared to the bit: losses, norms, loss scales, learning rates, all params and random numbers in
the end, and in each step checksums of gradients, main params and moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import protected_megatron
from tests.support.mortal_nodes import IMPORTS, mortal_nodes
from tests.support.node_job import Job
from tests.support.nodes import WHY_NOT
from tests.support.protected_megatron import STEP_RECORDS
from tests.support.protected_training import Plan
from tests.support.step_records import RecordedStep, parted, read_steps

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

EVERY, STEPS = 2, 16
PROTECT = {"protect_every": EVERY, "protect_timeout": 6.0}


@pytest.fixture(scope="module", params=["fork", "core"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """A run that nothing happens to, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp(request.param)
    with mortal_nodes(
        2, imports="tests.support.gpt" if request.param == "core" else IMPORTS
    ) as nodes:
        script = str(protected_megatron.__file__), request.param
        plan = Plan(str(folder / "whole"), STEPS, save_at=[*range(1, STEPS + 1)])
        yield Job(nodes, plan, name="whole", script=script).start().end()


def _protected(whole: Job, folder: Path, size: str) -> Job:
    plan = Plan(str(folder / "run"), STEPS, PROTECT, pause=0.3)
    return replace(whole, plan=plan, name="", size=size, agents={}).start()


def _recorded(job: Job) -> dict[int, RecordedStep]:
    return read_steps(Path(job.plan.folder) / STEP_RECORDS)


def _assert_same_steps(job: Job, expected: dict[int, RecordedStep]) -> None:
    found = _recorded(job)
    assert found.keys() == expected.keys() == {*range(STEPS + 1)}
    assert len(expected[STEPS].checksums) > 100
    assert parted(found, expected) == {}


def test_megatron_when_a_worker_or_a_node_is_lost_then_the_run_is_the_same(
    whole: Job, tmp_path: Path
) -> None:
    job = _protected(whole, tmp_path, "2:2")
    job.wait_for_step(4)
    job.nodes.do(1, f"kill -9 {job.processes(0.0)[3]}")
    job.wait_for_step(8, begins=1)
    job.lose(1)
    job.agents[0].wait_for("ends itself.* on node1 showed no life")
    job.start(1).end()
    assert [source for source, _ in job.begins.values()] == ["nothing", "memory", "memory"], (
        job.output
    )
    assert job.begins[1][1] >= 2 and job.begins[2][1] >= 6
    assert "2 of them brought to another node" in job.output
    job.assert_equal(whole)
    _assert_same_steps(job, _recorded(whole))


def test_megatron_when_a_node_is_lost_for_good_then_as_a_checkpoint_at_that_size(
    whole: Job, tmp_path: Path
) -> None:
    job = _protected(whole, tmp_path, "1:2")
    job.wait_for_step(6)
    job.lose(1)
    job.end()
    (source, first) = job.begins[1]
    assert source == "memory" and first >= 4, job.output
    disk = Path(whole.plan.folder) / "disk"
    (disk / "latest_checkpointed_iteration.txt").write_text(str(first))
    plan = Plan(str(tmp_path / "smaller"), STEPS, load=str(disk))
    smaller = (
        replace(whole, plan=plan, ranks=(2,), size="1:1", name="smaller", agents={}).start().end()
    )
    assert job.checksums == smaller.checksums and len(job.checksums) == 2
    assert job.curve == {step: whole.curve[step] for step in range(1, first + 1)} | smaller.curve
    _assert_same_steps(
        job,
        {step: each for step, each in _recorded(whole).items() if step < first}
        | _recorded(smaller),
    )
