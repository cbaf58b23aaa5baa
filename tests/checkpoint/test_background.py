"""Saving while training goes on: the copy, the thread that writes it, and what becomes of its
errors."""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint import background, disk, is_checkpoint, save
from megatron_distopt.checkpoint.background import BackgroundSaver, Staging, room_for
from megatron_distopt.checkpoint.folder import file_of
from megatron_distopt.checkpoint.save import TensorToWrite
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_mentions, assert_says, raised, refused
from tests.support.simulated import World
from tests.support.spawn import RankError, run_ranks
from tests.support.stored import TINY, Numbered, leftovers, number_in

ONE_RANK = Group(None, 0, 1)
#: Long enough for a thread that could go on to do so.
A_MOMENT = 0.1
#: A test that hangs fails.
SECONDS = 20.0


def _written(*tensors: Tensor) -> list[TensorToWrite]:
    return [
        TensorToWrite(f"main/{number}", tuple(tensor.shape), Box.whole(tensor.shape), tensor)
        for number, tensor in enumerate(tensors)
    ]


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# The copy.


def test_staging_when_the_live_state_changes_after_the_copy_then_the_copy_does_not() -> None:
    live = [
        _numbers(5, 3),
        _numbers(7, dtype=torch.bfloat16),
        _numbers(3, dtype=torch.int8),
        _numbers(2, 8).t(),
    ]
    tensors = _written(*live)
    staging = Staging(room_for(tensors), torch.device("cpu"))
    for _ in range(2):  # the memory is used again
        before = [tensor.clone() for tensor in live]
        copies = staging.copy(tensors)
        for tensor in live:
            tensor.add_(1)
        assert [(copy.key, copy.shape, copy.box) for copy in copies] == [
            (t.key, t.shape, t.box) for t in tensors
        ]
        for copy, old in zip(copies, before, strict=True):
            assert copy.tensor.dtype == old.dtype
            assert torch.equal(copy.tensor, old)


# The thread, in a world of one rank.


class Gate:
    """A disk that writes nothing before it is opened, and what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        write = disk.write

        def gated(file: Any, data: bytes | memoryview) -> None:
            self.reached.set()
            assert self.opened.wait(SECONDS), "the gate was never opened"
            write(file, data)

        monkeypatch.setattr(disk, "write", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()  # threads of a test that failed


@dataclass(frozen=True)
class Training:
    """One rank, whose state says which save it is from."""

    numbered: Numbered
    saver: BackgroundSaver
    folder: Path
    reader: World

    @classmethod
    def of(cls, folder: Path) -> Training:
        return cls(Numbered(World.of(TINY)), BackgroundSaver(ONE_RANK), folder, World.of(TINY))

    @property
    def model(self) -> WholeModel:
        return self.numbered.world.ranks[0].model

    def save(self, number: int, folder: Path | None = None) -> None:
        self.numbered.become(number)
        self.saver.save(folder or self.folder, self.model)

    def saved(self, number: int) -> None:
        self.save(number)
        self.saver.finish()

    def read(self, folder: Path | None = None) -> int:
        return number_in(folder or self.folder, self.reader)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training.of(tmp_path / "checkpoint")


def _full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_save_when_it_returns_then_the_state_may_change_and_the_checkpoint_has_the_old_one(
    training: Training, gate: Gate
) -> None:
    training.save(1)
    assert not is_checkpoint(training.folder)
    training.numbered.become(2)
    gate.opened.set()
    training.saver.finish()
    assert training.read() == 1
    assert leftovers(training.folder) == set()


def test_save_when_one_is_under_way_then_it_waits_for_it(
    training: Training, gate: Gate, tmp_path: Path
) -> None:
    training.save(1)
    second = _in_thread(lambda: training.save(2, tmp_path / "second"))
    second.join(A_MOMENT)
    assert second.is_alive()
    assert not (tmp_path / "second").exists()
    gate.opened.set()
    second.join(SECONDS)
    assert training.read() == 1
    training.saver.finish()
    assert training.read(tmp_path / "second") == 2


@pytest.mark.parametrize("call", ["write", "replace"])
def test_save_when_the_disk_fails_then_the_next_call_raises_and_the_checkpoint_before_stays(
    call: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.saved(1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, call, _full)
        training.save(2)  # says nothing
        with pytest.raises(CheckpointError) as raised:
            training.save(3)
    assert_mentions(raised.value, str(training.folder), "No space left on device", "Free space")
    assert training.read() == 1
    assert leftovers(training.folder) == set()
    training.saver.finish()  # it is said once
    training.saved(4)
    assert training.read() == 4


def test_save_when_the_copy_fails_then_it_raises_and_no_save_has_begun(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*arguments: object) -> None:
        raise RuntimeError("CUDA out of memory")

    training.saved(1)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "copy", out_of_memory)
        with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
            training.save(2)
    training.saver.finish()
    assert training.read() == 1
    assert leftovers(training.folder) == set()


def test_lock_when_a_save_is_finished_or_has_failed_then_others_may_save_there(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Training.of(training.folder)
    training.save(1)
    assert_says(
        refused(CheckpointError, lambda: other.save(2)),
        f"Another run is saving to checkpoint {training.folder} now. Give each run a folder of its "
        "own.",
    )
    training.saver.finish()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", _full)
        training.save(3)
        with pytest.raises(CheckpointError, match="No space left"):
            training.saver.finish()
    other.saved(4)
    assert training.read() == 4


# The end of the process.


def _hold_until(printed: threading.Event) -> None:
    """Nothing is written before that; later writes take long enough for the process to end before
    they have."""
    write = disk.write

    def slow_or_full(file: Any, data: bytes | memoryview) -> None:
        if "full" in str(file.name):
            _full()
        printed.wait()
        time.sleep(0.001)
        write(file, data)

    disk.write = slow_or_full


def _end_as_a_script(rank: int, size: int, folder: Path) -> None:
    """The interpreter is taken down, as it is after the last line of a script, with two saves under
    way."""
    for descriptor, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    printed = threading.Event()
    _hold_until(printed)
    trainings = [Training.of(folder / name) for name in ("slow", "full")]
    for training in trainings:
        training.save(1)
        training.numbered.become(2)
    os.write(1, f"{[is_checkpoint(training.folder) for training in trainings]}".encode())
    printed.set()
    ctypes.pythonapi.Py_Exit(0)


def test_exit_when_saves_are_under_way_then_waits_for_them_and_says_what_failed(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankError, match=r"left no result on ranks \[0\]; exit codes \{0: 0\}"):
        run_ranks(_end_as_a_script, 1, tmp_path)
    assert (tmp_path / "out").read_text() == "[False, False]"
    assert number_in(tmp_path / "slow", World.of(TINY)) == 1
    assert not is_checkpoint(tmp_path / "full")
    lines = (tmp_path / "error").read_text().splitlines()
    (line,) = [line for line in lines if "checkpoint" in line]
    assert_mentions(line, f"checkpoint {tmp_path / 'full'} was not saved", "No space left")


def _save_and_end(folder: str) -> None:
    printed = threading.Event()
    _hold_until(printed)
    Training.of(Path(folder)).save(1)
    os.write(2, f"{is_checkpoint(Path(folder))}".encode())
    printed.set()


def test_exit_when_multiprocessing_started_the_process_then_waits_for_the_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch.multiprocessing.spawn starts ranks so; before Python 3.13 such a process runs no atexit
    handler."""
    process = multiprocessing.get_context("fork").Process(
        target=_save_and_end, args=(str(tmp_path / "checkpoint"),)
    )
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    assert capfd.readouterr().err == "False"
    assert number_in(tmp_path / "checkpoint", World.of(TINY)) == 1


def test_exit_when_the_disk_hangs_then_says_after_a_while_that_nothing_was_saved(
    training: Training,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(background, "_SECONDS_AT_EXIT", 0.2)
    training.save(1)
    with caplog.at_level(logging.ERROR, logger="megatron_distopt"):
        training.saver._at_exit()
    (line,) = caplog.messages
    assert_mentions(line, f"checkpoint {training.folder} was not saved", "within 0 s")


# Two ranks.


@dataclass(frozen=True)
class Ended:
    """What a call raised on this rank, and what the folder holds afterwards."""

    kind: str
    text: str
    number: int
    left: frozenset[str]


class TwoRanks:
    """One of them."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.everyone = rank, folder, Group.of()
        self.numbered, self.reader = Numbered(World.of(TINY, dp=2)), World.of(TINY)
        self.saver = BackgroundSaver(self.everyone)

    def save(self, number: int) -> None:
        self.numbered.become(number)
        self.saver.save(self.folder, self.numbered.world.ranks[self.rank].model)

    def ended(self, call: Callable[[], object]) -> Ended:
        kind, text = raised(call)
        # The first rank has removed what failed before it raised; the second looks when it has.
        time.sleep(0.0 if self.rank == 0 else A_MOMENT)
        return Ended(
            kind, text, number_in(self.folder, self.reader), frozenset(leftovers(self.folder))
        )


def _fails_for(suffix: str) -> Callable[[Path], Any]:
    create = disk.create

    def fail(path: Path) -> Any:
        return _full() if path.name.endswith(suffix) else create(path)

    return fail


def _unseen_of_others(folder: Path, save_id: str, rank: int, suffix: str = "distcp") -> Path:
    return file_of(folder if rank == 0 else folder / "not there", save_id, rank, suffix)


#: What goes wrong in a save of two ranks, on one of them, and whether the next save raises it.
FAULTS: dict[str, tuple[int, dict[tuple[Any, str], Any], bool]] = {
    "failed": (1, {(disk, "create"): _fails_for(".distcp")}, True),
    # it cannot even write that it has failed
    "failed mutely": (1, {(disk, "create"): _fails_for("")}, False),
    "not shared": (
        0,
        {(save, "file_of"): _unseen_of_others, (save, "_SECONDS_TO_APPEAR"): A_MOMENT},
        False,
    ),
    "not committed": (0, {(disk, "replace"): _full}, True),
}


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Ended]:
    ranks, found = TwoRanks(rank, folder / "checkpoint"), {}
    ranks.save(1)
    found["saved"] = ranks.ended(ranks.saver.finish)
    for number, (name, (where, patches, saves_again)) in enumerate(FAULTS.items(), start=2):
        with pytest.MonkeyPatch.context() as patch:
            for (module, attribute), value in patches.items() if rank == where else ():
                patch.setattr(module, attribute, value)
            ranks.save(number)
            found[name] = ranks.ended(
                (lambda: ranks.save(99)) if saves_again else ranks.saver.finish
            )
    return found


facts = facts_of(collect_facts, 2)


def test_two_ranks_when_both_have_written_then_the_checkpoint_is_there(facts: Facts) -> None:
    assert facts["saved"] == [Ended("nothing", "", 1, frozenset())] * 2


@pytest.mark.parametrize("name", ["failed", "failed mutely"])
def test_two_ranks_when_one_cannot_write_then_both_raise_and_the_checkpoint_before_stays(
    name: str, facts: Facts
) -> None:
    first, second = facts[name]
    assert second.kind == "CheckpointError"
    assert_mentions(
        second.text, f"{facts.folder}/checkpoint", "-00001.distcp", "No space left on device"
    )
    # The first rank hears it from the second, or has read it in the folder before.
    assert first.kind in ("RanksDisagreeError", "CheckpointError")
    assert "rank 1" in first.text and second.text in first.text
    assert [(each.number, each.left) for each in facts[name]] == [(1, frozenset())] * 2


def test_two_ranks_when_the_disk_is_not_shared_then_both_raise_instead_of_waiting(
    facts: Facts,
) -> None:
    assert_says(
        facts.first["not shared"].text,
        f"No file of rank 1 has appeared in checkpoint {facts.folder}/checkpoint. "
        "Give a folder on a shared disk.",
    )
    _check_both(*facts["not shared"])


def _check_both(first: Ended, second: Ended) -> None:
    """The first rank raises its own error, the second that of the first; the checkpoint before is
    still there."""
    assert (first.kind, second.kind) == ("CheckpointError", "RanksDisagreeError")
    assert "rank 0" in second.text and first.text in second.text
    assert [(each.number, each.left) for each in (first, second)] == [(1, frozenset())] * 2


def test_two_ranks_when_the_commit_fails_then_both_raise_in_the_next_save(facts: Facts) -> None:
    first, second = facts["not committed"]
    assert_mentions(first.text, f"{facts.folder}/checkpoint", "No space left on device")
    _check_both(first, second)
