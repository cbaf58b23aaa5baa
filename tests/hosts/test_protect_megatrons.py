"""Snapshots in memory under the training scripts of Megatrons: a run that goes on from them is the
one that never stopped, to the bit, and at other sizes the one that a checkpoint on disk gives. The
fork of 2023 is the small one.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
import types
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.checkpoint.protect.protection import Protection
from tests.support.cases import Case
from tests.support.facts import Facts, facts_of
from tests.support.mini_fork import InstalledFork, point_to
from tests.support.protected_megatron import CORE, FP16, with_chance
from tests.support.refusals import assert_mentions, raised
from tests.support.spawn import run_ranks
from tests.support.step_records import Steps, differing, parted, read_steps, recorded_steps

ITERATIONS, STOP, NEWEST, ON_DISK = 5, 4, 3, 2
OURS = f"--use-distributed-optimizer {FP16} --train-iters {ITERATIONS} --global-batch-size 8"
SPLIT = "--tensor-model-parallel-size 2"


def _copied(memory: Path, to: Path) -> Path:
    """Collective: memory as the processes of a run left it, for others."""
    if dist.get_rank() == 0:
        end = time.monotonic() + 10.0
        while (
            len(list(memory.glob(f"*/{NEWEST:010d}-*/*.part"))) < dist.get_world_size()
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        shutil.copytree(memory, to)
    dist.barrier()
    return to


def _with_every_snapshot() -> None:
    """No snapshot is left out because the machine is slow."""
    border = Protection.border

    def patient(self: Protection, step: int, state: Callable[[], Any]) -> None:
        self.finish()
        border(self, step, state)

    Protection.border = patient  # type: ignore[method-assign]


class Fork:
    """Trainings of the small fork whose steps are recorded."""

    def __init__(self, folder: Path) -> None:
        self.fork, self.folder = InstalledFork.imported(file_layout="gathered"), folder
        with_chance(self.fork.script)
        _with_every_snapshot()
        (folder / "empty").mkdir(exist_ok=True)

    def train(self, name: str, words: str, memory: Path, load: Path | None = None) -> None:
        protect = (
            f"--distopt-protect-every 1 --distopt-protect-folder {memory} --load "
            f"{load or self.folder / 'empty'}"
        )
        with recorded_steps(self.folder / f"{name}.jsonl"):
            self.fork.train(*f"{OURS} {words} {protect}".split())

    def runs(self) -> dict[str, Steps]:
        return {path.stem: read_steps(path) for path in self.folder.glob("*.jsonl")}


def _first(
    rank: int, size: int, folder: Path
) -> tuple[dict[str, Steps], dict[str, tuple[str, str]]]:
    fork, memory = Fork(folder), folder / "memory"
    fork.train("straight", "", folder / "unused")
    fork.train("stopped", f"--exit-interval {STOP}", memory)
    fork.train("none on disk", "", _copied(memory, folder / "memory-0"))
    refusals = _refusals(fork, _copied(memory, folder / "memory-1"))
    refusals |= _beside_a_disk(fork, folder)
    return fork.runs(), refusals


def _beside_a_disk(fork: Fork, folder: Path) -> dict[str, tuple[str, str]]:
    """A run that dies in its second save, with a snapshot after the first one; then starts as it
    left the disk, and after a user has changed it. What is refused, by name."""
    disk, memory, training = folder / "disk", folder / "memory-died", fork.fork.training
    save, tracker = training.save_checkpoint, disk / "latest_checkpointed_iteration.txt"

    def dying(iteration: int, *others: Any) -> None:
        if iteration == STOP:
            raise RuntimeError("no power")
        save(iteration, *others)

    saving = f"--save {disk} --save-interval {ON_DISK}"
    with mock.patch.object(training, "save_checkpoint", dying):
        assert "no power" in raised(lambda: fork.train("died", saving, memory, disk))[1]
    copies = iter([_copied(memory, folder / f"memory-died-{number}") for number in range(5)])
    fork.train("as it was left", "", next(copies), disk)

    def refusal(name: str) -> tuple[str, str]:
        return raised(lambda: fork.train(f"refused, {name}", "", next(copies), disk))

    point_to(disk, ON_DISK)
    found = {"latest is written again": refusal("again")}
    if dist.get_rank() == 0:
        tracker.unlink()
    dist.barrier()
    found["checkpoints are removed"] = refusal("removed")
    fork.train("memory is taken", f"--distopt-protect-take {NEWEST}", next(copies), disk)
    moved = raised(lambda: fork.train("refused, moved", "", next(copies)))
    return {**found, "another folder": moved}


def _four_ranks(rank: int, size: int, folder: Path) -> None:
    fork = Fork(folder)
    own, disk, memory = fork.fork.training.train_step, folder / "disk", folder / "memory"
    fork.train("straight", SPLIT, folder / "unused")
    fork.train("stopped", f"{SPLIT} --exit-interval {STOP} --save {disk} --save-interval 1", memory)
    copies = iter([_copied(memory, folder / f"memory-{number}") for number in range(5)])
    point_to(disk, ON_DISK)
    take = f"--distopt-protect-take {NEWEST}"  # the run had saved in another folder than it loaded
    fork.train("older on disk", f"{SPLIT} {take}", next(copies), disk)
    fork.train("whole", "", next(copies))
    fork.train("in stages", "--pipeline-model-parallel-size 2", next(copies))
    point_to(disk, STOP)
    fork.train("newer on disk", SPLIT, next(copies), disk)
    assert fork.fork.training.train_step is not own
    fork.fork.uninstall()
    assert fork.fork.training.train_step is own


def _two_of_four_ranks(rank: int, size: int, folder: Path) -> dict[str, Steps]:
    fork = Fork(folder)
    point_to(folder / "disk", NEWEST)
    fork.train("fewer", SPLIT, folder / "memory-4")
    fork.train("fewer from disk", SPLIT, folder / "unused-2", folder / "disk")
    return fork.runs()


def _refusals(fork: Fork, memory: Path) -> dict[str, tuple[str, str]]:
    """Class and text by what is refused."""
    training, script, numbers = fork.fork.training, fork.fork.script, itertools.count()

    def refusal(
        words: str = "", load: str = f"--load {fork.folder / 'empty'}", where: Path | None = None
    ) -> Any:
        protect = (
            "--distopt-protect-every 1 --distopt-protect-folder "
            f"{where or fork.folder / f'new-{next(numbers)}'}"
        )
        own = "--use-distributed-optimizer --train-iters 5"
        return raised(lambda: fork.fork.train(*f"{own} {protect} {load} {words}".split()))

    found = {"no load": refusal(load="")}
    found |= {flag: refusal(flag) for flag in ("--finetune", "--no-load-optim")}
    found["global batch"] = refusal(f"{FP16} --global-batch-size 4", where=memory)

    def model_with(change: Callable[[Any], None]) -> Callable[..., Any]:
        def provide(**stage: bool) -> Any:
            model = GPTModel(**stage)
            model.register_buffer("bias", torch.zeros(2))
            model.register_forward_pre_hook(lambda module, given: [change(module)][1:] or None)
            return model

        return provide

    from megatron_distopt.hosts.megatron.protecting import check_arguments

    found["--ckpt-step"] = raised(lambda: check_arguments(Namespace(load="disk", ckpt_step=2)))
    GPTModel = script.GPTModel
    with mock.patch.object(
        script, "model_provider", model_with(lambda module: module.bias.add_(1.0))
    ):
        found["buffer"] = refusal()
    frozen = "language_model.embedding.position_embeddings.weight"
    with mock.patch.object(
        script, "model_provider", model_with(lambda module: module.get_parameter(frozen).add_(1.0))
    ):
        found["frozen"] = refusal("--frozen-param")
    fork.fork.uninstall()
    code = training.train_step.__code__
    names = ("forward", *code.co_varnames[1:])
    other = types.FunctionType(code.replace(co_varnames=names), vars(training))
    with mock.patch.object(training, "train_step", other):
        found["other signature"] = refusal()
        fork.fork.uninstall()

    @wraps(training.load_checkpoint)
    def logged(*given: Any, **named: Any) -> Any:
        """What users write around it."""

    with mock.patch.object(training, "load_checkpoint", logged):
        found["wrapped load"] = refusal()
        fork.fork.uninstall()
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the first rank returned; the other one was refused the same, or because of the first,
    which alone looks at the disk."""
    ranks = run_ranks(_first, 2, tmp_path_factory.mktemp("first"))
    kinds = [{name: kind for name, (kind, _) in refusals.items()} for _, refusals in ranks]
    of_disk = {name for name in kinds[1] if kinds[1][name] == "RanksDisagreeError"}
    assert kinds[0] == kinds[1] | dict.fromkeys(of_disk, "CheckpointError")
    return ranks[0]


@pytest.fixture(scope="module")
def of_2023(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    folder = tmp_path_factory.mktemp("fork")
    run_ranks(_four_ranks, 4, folder)
    return run_ranks(_two_of_four_ranks, 2, folder)[0]


def _assert_goes_on(straight: Steps, resumed: Steps, first: int) -> None:
    assert [*resumed] == [*range(first, ITERATIONS + 1)]
    assert resumed.keys() <= straight.keys()
    assert parted(straight, resumed) == {}
    assert all(each.norm == straight[step].norm for step, each in resumed.items() if step > first)


@pytest.mark.parametrize("name", ["none on disk", "as it was left", "memory is taken"])
def test_fork_of_2023_when_memory_is_newer_than_its_disk_then_goes_on_to_the_bit(
    name: str, first: Any
) -> None:
    _assert_goes_on(first[0]["straight"], first[0][name], NEWEST)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("latest is written again", "iteration 0000002 in"),
        ("checkpoints are removed", "iteration (none) in"),
        ("another folder", "empty/latest"),
    ],
)
def test_fork_of_2023_when_its_disk_was_changed_by_hand_then_refused_with_both_ways_on(
    name: str, found: str, first: Any
) -> None:
    kind, said = first[1][name]
    ways = f"MEGATRON_DISTOPT_PROTECT_TAKE={NEWEST}", "remove", "memory-died"
    assert kind == "CheckpointError"
    assert_mentions(said, found, "iteration 0000002 in", "disk/latest", *ways)


@pytest.mark.long
@pytest.mark.parametrize(("name", "first"), [("older on disk", NEWEST), ("newer on disk", STOP)])
def test_fork_of_2023_when_disk_and_memory_differ_then_the_newer_goes_on_to_the_bit(
    name: str, first: int, of_2023: dict[str, Steps]
) -> None:
    _assert_goes_on(of_2023["straight"], of_2023[name], first)


@pytest.mark.long
@pytest.mark.parametrize("name", ["whole", "in stages"])
def test_fork_of_2023_when_its_model_is_split_otherwise_then_has_the_same_state(
    name: str, of_2023: dict[str, Steps]
) -> None:
    straight, resumed = of_2023["straight"], of_2023[name]
    assert [*resumed] == [*range(NEWEST, ITERATIONS + 1)]
    assert differing(straight[NEWEST], resumed[NEWEST]) == []


@pytest.mark.long
def test_fork_of_2023_when_it_has_fewer_ranks_then_as_from_disk(of_2023: dict[str, Steps]) -> None:
    _assert_goes_on(of_2023["fewer from disk"], of_2023["fewer"], NEWEST)


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("no load", "ConfigError", ["--load FOLDER", "--save", "leave --distopt-protect-every"]),
        (
            "--finetune",
            "ConfigError",
            ["finetune=True", "Drop --finetune", "--distopt-protect-every"],
        ),
        ("--no-load-optim", "ConfigError", ["no_load_optim=True", "Drop --no-load-optim"]),
        ("global batch", "ConfigError", ["global_batch_size is 4", "--global-batch-size 8"]),
        ("buffer", "ConfigError", ["bias", "Leave --distopt-protect-every"]),
        ("frozen", "ConfigError", ["position_embeddings", "Leave --distopt-protect-every"]),
        (
            "wrapped load",
            "HostMismatchError",
            [
                "megatron.training.load_checkpoint",
                "code object logged",
                "test_protect_megatrons.py",
                "--distopt-protect-every",
            ],
        ),
        (
            "--ckpt-step",
            "ConfigError",
            ["ckpt_step=2", "Drop --ckpt-step", "latest_checkpointed_iteration.txt"],
        ),
        (
            "other signature",
            "HostMismatchError",
            ["megatron.training.train_step", "--distopt-protect-every"],
        ),
    ],
)
def test_run_when_a_snapshot_would_lack_something_then_refused_on_all_ranks(
    name: str, kind: str, parts: list[str], first: Any
) -> None:
    assert first[1][name][0] == kind
    assert_mentions(first[1][name][1], *parts)


def _of_core(rank: int, size: int, folder: Path) -> dict[str, Any]:
    from megatron_distopt.patch_points import in_force
    from tests.support.core_script import ScriptOfCore

    _with_every_snapshot()
    script, found = ScriptOfCore.imported(), dict[str, Any]()
    own = script.training.train_step

    def run(
        name: str, memory: Path, load: Path = folder / "empty", case: Case = CORE, **arguments: Any
    ) -> None:
        protect = {
            "MEGATRON_DISTOPT_PROTECT_EVERY": "1",
            "MEGATRON_DISTOPT_PROTECT_FOLDER": str(memory),
            # the run has saved in another folder than it loads
            **({"MEGATRON_DISTOPT_PROTECT_TAKE": str(NEWEST)} if name == "older on disk" else {}),
        }
        with mock.patch.dict(os.environ, protect):
            script.run(case, load, **{"train_iters": ITERATIONS, **arguments})
        found[name] = script.records

    disk, memory = folder / "disk", folder / "memory"
    run("straight", folder / "unused")
    run("stopped", memory, train_iters=STOP, save=str(disk), save_at=[ON_DISK])
    copies = iter([_copied(memory, folder / f"memory-{number}") for number in range(4)])
    run("none on disk", next(copies))
    assert script.training.updates[-1] == 8 * NEWEST
    run("older on disk", next(copies), disk)
    whole = CORE.of(tp=1, dp=4, num_microbatches=1)
    run("whole", next(copies), case=whole)
    run("to disk", folder / "other", train_iters=NEWEST, save=str(disk), save_at=[NEWEST])
    run("whole from disk", folder / "another", disk, whole)
    assert script.training.train_step is not own
    in_force.undo()
    assert script.training.train_step is own
    return found


of_core = facts_of(_of_core, 4, core=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ["none on disk", "older on disk"])
def test_megatron_core_when_it_resumes_from_memory_then_equal_to_the_bit(
    name: str, of_core: Facts
) -> None:
    for of_rank in of_core.by_rank:
        assert of_rank[name] == {
            at: each for at, each in of_rank["straight"].items() if at > NEWEST
        }


@pytest.mark.long
def test_megatron_core_when_its_sizes_are_others_then_as_from_disk(of_core: Facts) -> None:
    for of_rank in of_core.by_rank:
        assert [*of_rank["whole"]] == [*range(NEWEST + 1, ITERATIONS + 1)]
        assert of_rank["whole"] == of_rank["whole from disk"]
