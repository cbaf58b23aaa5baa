"""Snapshots in memory: what they survive, to the bit, on nodes that are folders of one machine.

Exercises checkpoint/protect/transfer.py, session/run_session.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_distopt import distribute
from megatron_distopt.checkpoint.protect import nodes as nodes_module
from megatron_distopt.checkpoint.protect.nodes import Nodes, check_space, folder_of
from megatron_distopt.checkpoint.protect.restart import Resumed
from megatron_distopt.checkpoint.protect.snapshots import held
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError, ConfigError
from tests.support.facts import Facts, facts_of
from tests.support.models import Params, exact_grads
from tests.support.refusals import assert_mentions, logged
from tests.support.spawn import run_ranks

SIZE, NUM_STEPS, EVERY = 4, 8, 2
#: Of each layout the number of the node by rank.
LAYOUTS = {"two nodes": (0, 0, 1, 1), "three nodes, uneven": (0, 1, 1, 2), "one node": (0, 0, 0, 0)}


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


class _Run:
    """A model that trains in bf16 with a scheduler, its node's memory below a folder."""

    def __init__(
        self,
        folder: Path,
        layout: Sequence[int],
        group: Any = None,
        model: Any = None,
        lr: float = 2.0**-6,
        **options: Any,
    ) -> None:
        rank = dist.get_rank()
        memory = folder / f"node-{layout[rank]}"
        self.rank, self.model = (
            dist.get_rank(group),
            Params(default=torch.bfloat16) if model is None else model,
        )
        adamw = torch.optim.AdamW(
            self.model.groups() if model is None else self.model.parameters(), lr=lr
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 / (1 + step))
        self.optimizer = distribute(
            self.model,
            adamw,
            process_group=group,
            clip_grad=1.0,
            protect_folder=str(memory),
            **options,
        )
        self.step = 0

    def train(self, last: int, *, protected: bool = True) -> None:
        while self.step < last:
            self.model(exact_grads(self.step, 0, self.rank)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            if protected:
                state = {"scheduler": self.scheduler.state_dict(), "rank": self.rank}
                self.optimizer.protect(self.step, lambda state=state: state)
                self.finish()

    def finish(self) -> None:
        protection = self.optimizer.session.protection
        assert protection is not None, "protect_every is set"
        protection.finish()

    def resume(self, newer_than: int = -1) -> Resumed | None:
        resumed = self.optimizer.resume(newer_than)
        if resumed is not None:
            self.step = resumed.step
            self.scheduler.load_state_dict(resumed.state["scheduler"])
        return resumed

    def end(self) -> list[torch.Tensor]:
        params = [param.detach().clone() for param in self.model.parameters()]
        self.optimizer.release()
        return params


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _of(folder: Path, node: str, step: int, rank: int, suffix: str = "distcp") -> Path:
    (path,) = (folder / node / "0").glob(f"{step:010d}-*/*-{rank:05d}.{suffix}")
    return path


#: What happens to the memory of two nodes with snapshots of steps 4 and 6, and the step from which
#: the run goes on.
LOSSES: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "nothing": (lambda folder: None, 6),
    "node 0": (lambda folder: shutil.rmtree(folder / "node-0"), 6),
    "node 1": (lambda folder: shutil.rmtree(folder / "node-1"), 6),
    "both nodes": (
        lambda folder: [shutil.rmtree(folder / f"node-{node}") for node in (0, 1)],
        None,
    ),
    "a byte of one copy": (lambda folder: _damage(_of(folder, "node-1", 6, 3)), 6),
    "a record of one copy": (lambda folder: _of(folder, "node-0", 6, 0, "part").unlink(), 6),
    "a byte of both": (
        lambda folder: [_damage(_of(folder, f"node-{node}", 6, 2)) for node in (0, 1)],
        4,
    ),
    "a record's bytes": (
        lambda folder: [_damage(_of(folder, f"node-{node}", 6, 2, "part")) for node in (0, 1)],
        4,
    ),
    "both, of both snapshots": (
        lambda folder: [
            _damage(_of(folder, f"node-{node}", step, 2)) for node in (0, 1) for step in (4, 6)
        ],
        None,
    ),
    "one node, and a byte on the other": (
        lambda folder: [shutil.rmtree(folder / "node-0"), _damage(_of(folder, "node-1", 6, 0))],
        4,
    ),
}


def _as_uninterrupted(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """By layout and loss the step from which the run went on, and whether it ended to the bit as
    without a loss."""
    plain = _Run(folder / "none", LAYOUTS["one node"])
    plain.train(NUM_STEPS, protected=False)
    expected, found = plain.end(), dict[str, Any]()
    for layout, numbers in LAYOUTS.items():
        run = _Run(folder / layout, numbers, protect_every=EVERY)
        assert run.resume() is None, "nothing is there"
        run.train(7)
        run.end()
        for loss, (lose, _) in (
            LOSSES.items() if layout == "two nodes" else [("nothing", LOSSES["nothing"])]
        ):
            kept = folder / f"{layout} {loss}"
            dist.barrier()
            if rank == 0:
                shutil.copytree(folder / layout, kept)
                lose(kept)
            dist.barrier()
            again = _Run(kept, numbers, protect_every=EVERY)
            resumed = again.resume()
            if resumed is not None:
                again.train(NUM_STEPS)
            params = again.end()
            found[f"{layout}: {loss}"] = resumed and (
                (resumed.step, resumed.state["rank"] == rank, resumed.is_same_size),
                all(map(torch.equal, params, expected)),
            )
    return found


losses = facts_of(_as_uninterrupted, SIZE)


@pytest.mark.parametrize("loss", LOSSES)
def test_run_when_two_nodes_lose_something_then_it_goes_on_from_what_is_whole_to_the_bit(
    losses: Facts, loss: str
) -> None:
    step = LOSSES[loss][1]
    expected = None if step is None else ((step, True, True), True)
    assert losses[f"two nodes: {loss}"] == [expected] * SIZE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_when_started_anew_on_nodes_of_any_number_then_it_ends_to_the_bit_as_uninterrupted(
    losses: Facts, layout: str
) -> None:
    assert losses[f"{layout}: nothing"] == [((6, True, True), True)] * SIZE


def _at_other_sizes(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """By the number of ranks, whether memory and a checkpoint of the same step lead to the same
    params."""
    numbers, found = LAYOUTS["two nodes"], dict[str, Any]()
    run = _Run(folder / "memory", numbers, protect_every=6)
    run.resume()
    run.train(6)
    run.optimizer.save(folder / "disk")
    state = run.scheduler.state_dict()
    run.end()
    for count in (3, 2, 1):
        group = dist.new_group(list(range(count)))
        if rank >= count:
            continue
        kept = folder / f"memory {count}"
        if rank == 0:
            shutil.copytree(folder / "memory", kept)
        dist.barrier(group)
        one, other = (
            _Run(kept, numbers, group, **options) for options in ({"protect_every": 6}, {})
        )
        resumed = one.resume()
        other.optimizer.load(folder / "disk")
        other.scheduler.load_state_dict(state)
        other.step = 6
        one.train(NUM_STEPS)
        other.train(NUM_STEPS, protected=False)
        is_equal = all(map(torch.equal, one.end(), other.end()))
        found[str(count)] = (
            resumed and (resumed.step, resumed.state["rank"], resumed.is_same_size),
            is_equal,
        )
    dist.barrier()
    return found


def test_run_when_fewer_ranks_are_left_then_it_goes_on_to_the_bit_as_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    found = run_ranks(_at_other_sizes, SIZE, tmp_path)
    for count in (3, 2, 1):
        assert [each[str(count)] for each in found[:count]] == [((6, 0, False), True)] * count


def _beside(rank: int, size: int, folder: Path) -> list[bool]:
    """Running statistics, and a teacher that follows the model: whether both are back, and training
    goes on alike."""

    class Taught(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.student = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
            self.teacher = torch.nn.Linear(6, 4).requires_grad_(False)

        def train_on(self, optimizer: Any, step: int) -> None:
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            (self.student(batch) - self.teacher(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student[0].weight, 0.1)

    states = []
    for name, start in (("whole", 3), ("interrupted", 2)):
        run = _Run(folder / name, LAYOUTS["two nodes"], model=Taught(), protect_every=2)
        assert run.optimizer.resume() is None, "nothing is there"
        for first, last in ((0, 3), (start, 4)):
            for step in range(first, last):
                run.model.train_on(run.optimizer, step)
                run.optimizer.protect(step + 1)
                run.finish()
            if last < 4 and name == "interrupted":
                run.end()
                run = _Run(folder / name, LAYOUTS["two nodes"], model=Taught(), protect_every=2)
                assert run.optimizer.resume() is not None, "a snapshot of step 2 is there"
        states.append(run.model.state_dict())
        run.end()
    return [torch.equal(states[0][name], states[1][name]) for name in states[0]]


def test_run_when_training_changes_buffers_and_frozen_params_then_they_are_back_as_well(
    tmp_path: Path,
) -> None:
    assert run_ranks(_beside, SIZE, tmp_path) == [[True] * 9] * SIZE


def _said_by(start: Callable[[], object]) -> list[str]:
    """What the package logs meanwhile."""
    with logged() as lines:
        start()
    return lines


def _beside_a_disk(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A run with a snapshot of step 6 and checkpoints of steps 2, 4 and 7, of which the last came
    after the snapshot: by what a start does before `resume`, the step from which it goes on, or the
    error."""
    numbers, found = (0, 1), dict[str, Any]()
    run = _Run(folder / "memory", numbers, protect_every=EVERY)
    run.resume()
    for step in (2, 4, 7):
        run.train(step)
        run.optimizer.save(folder / f"disk-{step}")
    run.end()
    starts: dict[str, tuple[int, int, dict[str, Any]]] = {
        "nothing": (0, -1, {}),
        "the newest then": (4, -1, {}),
        "the newest then, and says its step": (4, 4, {}),
        "a newer one": (7, -1, {}),
        "a newer one, and says its step": (7, 7, {}),
        "an older one": (2, -1, {}),
        "an older one, and says its step": (2, 2, {}),
        "an older one, and takes memory": (2, 2, {"protect_take": 6}),
        "an older one, and takes another step": (2, 2, {"protect_take": 4}),
    }
    for name, (step, newer_than, options) in starts.items():
        kept = folder / name
        if rank == 0:
            shutil.copytree(folder / "memory", kept)
        dist.barrier()
        run = _Run(kept, numbers, protect_every=EVERY, **options)
        if step:
            run.optimizer.load(folder / f"disk-{step}")
        try:
            resumed = run.resume(newer_than)
            found[name] = resumed and resumed.step
        except CheckpointError as error:
            found[name] = str(error)
        run.end()
    return found


beside_a_disk = facts_of(_beside_a_disk, 2)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("nothing", 6),
        ("the newest then", 6),
        ("the newest then, and says its step", 6),
        ("a newer one", 6),
        ("a newer one, and says its step", None),
        ("an older one, and takes memory", 6),
    ],
)
def test_run_when_its_checkpoints_are_as_it_left_them_then_it_goes_on_from_the_newest_state(
    name: str, step: int | None, beside_a_disk: Facts
) -> None:
    assert beside_a_disk[name] == [step] * 2


@pytest.mark.parametrize(
    "name",
    ["an older one", "an older one, and says its step", "an older one, and takes another step"],
)
def test_run_when_it_was_rolled_back_by_hand_then_refused_with_both_ways_on(
    name: str, beside_a_disk: Facts
) -> None:
    for rank, said in enumerate(beside_a_disk.by_rank):
        folder = f"node-{rank}/0"
        assert_mentions(
            said[name], "2 updates", "4 updates", "MEGATRON_DISTOPT_PROTECT_TAKE=6", folder
        )


def _other_starts(rank: int, size: int, folder: Path) -> dict[str, list[str]]:
    """What starts say that one after the other have the same options, another rate, and another
    form of the state; then of a checkpoint that has the state of the first."""
    numbers, said, options = (0, 1), dict[str, list[str]](), dict[str, Any]()
    # groups without a wd_mult, by which those of a Megatron are known
    new_model = partial(Params, default=torch.bfloat16)
    run = _Run(folder / "memory", numbers, model=new_model(), protect_every=EVERY)
    run.resume()
    run.train(5)
    run.optimizer.save(folder / "disk")
    run.end()
    starts = ("the same", {}), ("another rate", {"lr": 2.0**-5}), ("that rate again", {})
    for name, changed in (*starts, ("another form", {"exp_avg_sq_dtype": "bfloat16"})):
        options |= changed
        run = _Run(folder / "memory", numbers, model=new_model(), protect_every=EVERY, **options)
        said[name] = _said_by(run.resume)
        run.train(run.step + EVERY + 1)
        run.end()
    for name, lr in (("disk", 2.0**-6), ("disk, another rate", 2.0**-5)):
        run = _Run(folder / name, numbers, model=new_model(), lr=lr)
        said[name] = _said_by(lambda run=run: run.optimizer.load(folder / "disk"))
        run.end()
    return said


other_starts = facts_of(_other_starts, 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("the same", []),
        ("another rate", ["initial_lr", "lr"]),
        ("that rate again", []),
        ("another form", []),
        ("disk", []),
        ("disk, another rate", ["initial_lr", "lr"]),
    ],
)
def test_option_when_a_scheduler_changes_it_then_told_only_where_the_user_gave_another(
    name: str, expected: list[str], other_starts: Facts
) -> None:
    told = [line.split()[1] for line in other_starts.first[name] if line.startswith("resumed: ")]
    assert told == expected, other_starts.first[name]


def test_state_when_its_form_is_another_after_a_restart_then_told(other_starts: Facts) -> None:
    (line,) = [line for line in other_starts.first["another form"] if line.startswith("resumed at")]
    assert re.search("as .*exp_avg_sq_dtype='float32'.* continues as .*_sq_dtype='bfloat16'", line)
    assert "continues as" not in "".join(other_starts.first["that rate again"])


def _left(rank: int, size: int, folder: Path) -> list[str]:
    """Says what starts say of the run before. Ends with one run released, one not, and one that
    never began."""
    said = []
    for name in ("released", "held"):
        run = _Run(folder / name, (0, 1), protect_every=EVERY)
        said += [line for line in _said_by(run.resume) if "Lost ranks" not in line]
        run.train(5)
        if name == "released":
            run.end()
        _OPEN.append(run)
    _OPEN.append(_Run(folder / "only made", (0, 1), protect_every=EVERY))
    return said


#: Runs that live as long as their process.
_OPEN: list[_Run] = []


def test_run_when_its_process_has_ended_then_its_memory_is_free_and_the_next_start_says_so(
    tmp_path: Path,
) -> None:
    for is_first in (True, False):
        said = run_ranks(_left, 2, tmp_path)
        assert said[1] == []
        expected = "no snapshot in memory is used; the run before had ended at step 5"
        found = [line.startswith(expected) for line in said[0]]
        assert found == ([] if is_first else [True] * 2), said[0]
        for name in ("released", "held"):
            assert [held(tmp_path / name / node / "0") for node in ("node-0", "node-1")] == [{}] * 2


def _refusals(rank: int, size: int, folder: Path) -> dict[str, str]:
    nodes_module._SECONDS_OF_A_LOCK = 0.2
    numbers, said = (0, 1), dict[str, str]()

    def says(case: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - compared with what is expected
            said[case] = f"{type(error).__name__}: {error}"

    run = _Run(folder / "a", numbers, protect_every=1)
    says("no resume", lambda: run.train(1))
    run.resume()
    said["stale"] = str(run.resume())
    says("numpy", lambda: run.optimizer.protect(1, lambda: {"generator": torch.zeros(1).numpy()}))
    says("step", lambda: run.optimizer.protect(1 + rank, lambda: None))
    says("locked", lambda: _Run(folder / "a", numbers, protect_every=1))
    run.train(4)
    run.end()
    run = _Run(folder / "a", numbers, model=_Other(), protect_every=1)
    said["other model"] = str(run.optimizer.resume())
    run.end()
    run = _Run(folder / "b", numbers, protect_every=1)
    says("no border", lambda: run.train(9, protected=False))
    run.end()
    run = _Run(folder / "c", numbers, protect_every=1)
    run.resume()
    run.train(2)
    flat = run.optimizer.sharded.flat_params[0]
    if rank == 1:
        run.optimizer.sharded.inner.state[flat.main]["exp_avg"][0] = torch.nan
    run.optimizer.protect(3)
    run.finish()
    run.optimizer.protect(4)
    run.finish()
    said["nan"] = ", ".join(
        sorted(f"{each.step}: {ranks}" for each, ranks in held(folder / "c/node-0/0").items())
    )
    run.end()
    return said


class _Other(Params):
    """Another model under the same name of a job."""

    def __init__(self) -> None:
        super().__init__(default=torch.bfloat16)
        self.more = torch.nn.Parameter(torch.zeros(3))


EXPECTED = {
    "no resume": "Call resume() of the optimizer once before training",
    "numpy": "only tensors, numbers, texts",
    "step": "number of steps that are done, the same on all ranks",
    "locked": "--rdzv-id or protect_folder",
    "no border": "third step without a call of protect",
}


refusals = facts_of(_refusals, 2)


@pytest.mark.parametrize("case", EXPECTED)
def test_protect_when_used_wrongly_then_refused_on_all_ranks(refusals: Facts, case: str) -> None:
    assert all(EXPECTED[case].lower() in said.lower() for said in refusals[case]), refusals.by_rank


def test_snapshot_when_a_rank_has_a_nan_then_the_one_before_stays(refusals: Facts) -> None:
    assert refusals.first["nan"].startswith("2: [0, 1]")


def test_snapshot_when_it_is_of_another_model_then_not_taken(refusals: Facts) -> None:
    assert refusals["other model"] == ["None"] * 2


# Decisions without ranks.


_NAMED = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("given", "environ", "says"),
    [
        (None, {}, "--rdzv-id NAME"),
        (None, {"TORCHELASTIC_RUN_ID": "none"}, "--rdzv-id NAME"),
        (
            "/a",
            {**_NAMED, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_folder_when_a_job_cannot_be_found_again_then_refused(
    given: str | None, environ: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        folder_of(given, environ, Group(None, 0, 1))


def test_folder_when_the_job_has_a_name_then_of_user_and_job() -> None:
    assert folder_of(None, _NAMED, Group(None, 0, 1)).match("/dev/shm/megatron_distopt-*-job/0")
    assert folder_of("/a", {}, Group(None, 0, 1)) == Path("/a/0")


def test_space_when_it_is_that_of_docker_then_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, free = Nodes(Group(None, 0, 1), (0,)), 64 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free, 0, free))
    check_space(tmp_path, 32 << 20, nodes)
    with pytest.raises(CheckpointError, match="--shm-size=4g"):
        check_space(tmp_path, 3 << 29, nodes)
