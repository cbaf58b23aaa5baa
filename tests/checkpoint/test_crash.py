"""A save that ends at any moment, by a signal, a power cut or an error: the old checkpoint or the
new one, whole."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_distopt.checkpoint import disk, folder, save_checkpoint
from megatron_distopt.checkpoint.folder import (
    is_checkpoint,
    lock_file,
    new_save_id,
    read_manifest,
    withdraw,
)
from megatron_distopt.checkpoint.save import contribution_of
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import CheckpointError
from tests.support.refusals import assert_mentions, assert_says, refused
from tests.support.simulated import Param, World
from tests.support.stored import TINY, Numbered, leftovers, number_in, savings

CALLS = ("make_folder", "create", "write", "sync", "replace", "remove", "sync_folder")
ONE_RANK = Group(None, 0, 1)
#: Writes are many and alike: every so many of them is tried, and all other calls.
EVERY_WRITE = 150


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps what a killed process has written, so that waiting for the disk changes
    nothing but the time.

    A power cut is another thing: `Durable` counts on `disk.sync`, not on what it does.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def two_ranks() -> Numbered:
    return Numbered(World.of(TINY, dp=2))


@pytest.fixture(scope="module")
def reader() -> World:
    return World.of(TINY)


@contextmanager
def watched(around: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Every call that changes the disk goes through `around(name, call, arguments)`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            call = getattr(disk, name)
            patch.setattr(disk, name, lambda *given, of=name, call=call: around(of, call, given))
        yield


def calls_of(action: Callable[[], None]) -> list[str]:
    """Names of the calls that change the disk."""
    names: list[str] = []

    def note(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        names.append(name)
        return call(*arguments)

    with watched(note):
        action()
    return names


def worth_trying(calls: list[str]) -> Iterator[int]:
    """Numbers of calls: all but writes, and some writes."""
    writes = 0
    for number, name in enumerate(calls):
        writes += name == "write"
        if name != "write" or writes % EVERY_WRITE == 0:
            yield number


def is_committed(calls: list[str], number: int) -> bool:
    """Whether the manifest has been replaced when that call is reached."""
    return calls.index("replace") < number


def killed(action: Callable[[], object], number: int) -> int:
    """Runs it in a process that ends itself by SIGKILL before a call, or when half of a write is
    done; the status."""
    seen: list[str] = []

    def around(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        seen.append(name)
        is_last = len(seen) == number + 1
        if is_last and name != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_last:
            arguments = (arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
        result = call(*arguments)
        if name == "write":
            # or all that is written lies in the process, and most points look the same
            arguments[0].flush()
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        with watched(around):
            action()
    finally:
        os._exit(1)


def test_save_when_killed_at_any_call_then_one_checkpoint_is_whole_and_the_next_save_clears_up(
    tmp_path: Path, two_ranks: Numbered, reader: World
) -> None:
    two_ranks.save(tmp_path, 1)
    calls = calls_of(lambda: two_ranks.save(tmp_path, 2))
    points = list(worth_trying(calls))
    assert {calls[number] for number in points} == set(CALLS)
    for number in points:
        old = two_ranks.now
        status = killed(lambda old=old: two_ranks.save(tmp_path, old + 1), number)
        assert os.WIFSIGNALED(status), f"call {number} of {len(calls)} was not reached"
        wanted = old + 1 if is_committed(calls, number) else old
        assert number_in(tmp_path, reader) == wanted, f"killed in call {number}, {calls[number]}"
        two_ranks.save(tmp_path, old + 2)
        assert leftovers(tmp_path) == set(), f"killed in call {number}, {calls[number]}"
    assert number_in(tmp_path, reader) == two_ranks.now


def test_first_save_when_killed_then_there_is_no_checkpoint_or_a_whole_one(
    tmp_path: Path, two_ranks: Numbered, reader: World
) -> None:
    calls = calls_of(lambda: two_ranks.save(tmp_path / "all" / "iter_0000001", 1))
    for number in list(worth_trying(calls))[::8]:
        place = tmp_path / str(number) / "iter_0000001"
        assert os.WIFSIGNALED(killed(lambda place=place: two_ranks.save(place, 1), number))
        assert is_checkpoint(place) == is_committed(calls, number)
        if is_checkpoint(place):
            assert number_in(place, reader) == 1
        else:
            with pytest.raises(CheckpointError, match="no finished checkpoint"):
                reader.load(place)
        two_ranks.save(place, 1)
        assert leftovers(place) == set()


@dataclass
class Durable:
    """What of a folder is on the disk: contents that were synced, and names as of the last sync of
    the folder.

    Later changes of names may have come to the disk or not, each for itself; the rest of a file's
    bytes likewise.
    """

    folder: Path
    names: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, ...]] = field(default_factory=list)
    contents: dict[int, bytes] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Path) -> Durable:
        """A folder all of which is on the disk."""
        files = {path.name: number for number, path in enumerate(sorted(place.iterdir()))}
        contents = {number: (place / name).read_bytes() for name, number in files.items()}
        return cls(place, dict(files), [], contents, dict(files))

    def note(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """For `watched`."""
        result = call(*arguments)
        if name == "create":
            number = len(self.contents)
            self.contents[number], self.now[arguments[0].name] = b"", number
            self.pending.append(("create", arguments[0].name, str(number)))
        elif name == "sync":
            self.contents[self.now[Path(arguments[0].name).name]] = Path(
                arguments[0].name
            ).read_bytes()
        elif name == "replace":
            number = self.now[arguments[1].name] = self.now.pop(arguments[0].name)
            self.pending.append(("replace", arguments[0].name, str(number), arguments[1].name))
        elif name == "remove" and self.now.pop(arguments[0].name, None) is not None:
            self.pending.append(("remove", arguments[0].name))
        elif name == "sync_folder":
            self.names, self.pending = dict(self.now), []
        return result

    def after_a_cut(self, target: Path, is_kept: Callable[[], bool]) -> None:
        """Makes a folder of what may be found after the power comes back."""
        names = dict(self.names)
        for kind, *what in self.pending:
            if not is_kept():
                continue
            if kind != "create":
                names.pop(what[0], None)
            if kind != "remove":
                names[what[-1] if kind == "replace" else what[0]] = int(what[1])
        for path in target.iterdir():
            path.unlink()
        for name, number in names.items():
            (target / name).write_bytes(self.contents[number])


def test_save_when_the_power_is_cut_at_any_call_then_one_checkpoint_is_whole(
    tmp_path: Path, reader: World
) -> None:
    place, found = tmp_path / "disk", tmp_path / "found"
    found.mkdir()
    Numbered(World.of(TINY, dp=2)).save(place, 1)
    durable, chance = Durable.of(place), random.Random(3)
    outcomes: list[tuple[bool, int]] = []

    def note_and_cut(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = durable.note(name, call, arguments)
        by_chance = [lambda: chance.random() < 0.5] * (
            4 if name in ("replace", "sync_folder") else 1
        )
        for is_kept in (lambda: False, lambda: True, *by_chance) if name != "write" else ():
            durable.after_a_cut(found, is_kept)
            outcomes.append(
                (any(what[0] == "remove" for what in durable.pending), number_in(found, reader))
            )
        return result

    with watched(note_and_cut):
        Numbered(World.of(TINY)).save(place, 2)
    assert {number for _, number in outcomes} == {1, 2}
    assert all(number == 2 for is_removing, number in outcomes if is_removing), (
        "removed before the new one was safe"
    )
    durable.after_a_cut(found, lambda: False)
    assert number_in(found, reader) == 2 and len(outcomes) > 20


def test_folder_when_made_for_a_save_then_its_name_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_folder", synced.append)
    disk.make_folder(tmp_path / "run" / "iter_0000001")
    assert synced == [tmp_path / "run", tmp_path]
    disk.make_folder(tmp_path / "run" / "iter_0000001")
    assert len(synced) == 2


class _Interrupt(KeyboardInterrupt):
    """Ours, so that a person's own is not mistaken for it."""


def failing(number: int, error: BaseException) -> AbstractContextManager[object]:
    """One call that changes the disk raises instead."""
    seen: list[str] = []

    def around(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        seen.append(name)
        if len(seen) == number + 1:
            raise error
        return call(*arguments)

    return watched(around)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), _Interrupt()])
def test_save_when_any_call_fails_then_one_checkpoint_is_whole_and_nothing_is_left_over(
    tmp_path: Path, two_ranks: Numbered, reader: World, error: BaseException
) -> None:
    two_ranks.save(tmp_path, 1)
    calls = calls_of(lambda: two_ranks.save(tmp_path, 2))
    points = list(worth_trying(calls))[:: 1 if isinstance(error, OSError) else 3]
    raised = 0
    for number in points:
        old = two_ranks.now
        try:
            with failing(number, error):
                two_ranks.save(tmp_path, old + 1)
        except (CheckpointError, OSError, _Interrupt):
            raised += 1
        else:
            assert calls[number] == "remove", f"call {number}, {calls[number]}: the error was lost"
        wanted = old + 1 if is_committed(calls, number) else old
        assert number_in(tmp_path, reader) == wanted, f"{error!r} in call {number}, {calls[number]}"
        assert wanted != old or leftovers(tmp_path) == set(), (
            f"{error!r} in call {number}, {calls[number]}"
        )
        two_ranks.save(tmp_path, old + 2)
        assert leftovers(tmp_path) == set()
    assert raised >= len(points) - calls.count("remove")


def test_save_when_a_rank_dies_just_after_the_commit_then_the_new_checkpoint_stays(
    tmp_path: Path, reader: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Numbered(World.of(TINY))
    one.save(tmp_path, 1)
    calls = []

    def second_exchange_fails(check: Callable[[], Any], group: Group, what: str) -> Any:
        value = raise_together(check, group, what)
        calls.append(what)
        if len(calls) == 2:
            raise ConnectionError("connection closed by peer")
        return value

    monkeypatch.setattr("megatron_distopt.checkpoint.save.raise_together", second_exchange_fails)
    one.become(2)
    with pytest.raises(ConnectionError):
        save_checkpoint(tmp_path, one.world.ranks[0].model, ONE_RANK)
    assert number_in(tmp_path, reader) == 2


def test_save_when_fewer_ranks_save_then_no_file_of_the_others_is_left(
    tmp_path: Path, reader: World
) -> None:
    Numbered(World.of(TINY, dp=4)).save(tmp_path, 1)
    Numbered(World.of(TINY, dp=1)).save(tmp_path, 2)
    assert len(list(tmp_path.glob("*.distcp"))) == 1 and leftovers(tmp_path) == set()
    assert number_in(tmp_path, reader) == 2


def test_save_when_files_of_others_lie_there_then_they_stay(
    tmp_path: Path, two_ranks: Numbered
) -> None:
    theirs = {"__0_0.distcp", "notes.part", "run.new", "0123456-00000.part"}
    ours = {
        "01234567-00000.part",
        "01234567-00002.distcp",
        "01234567-manifest.json.new",
        "01234567-00001.failed",
    }
    for name in theirs | ours:
        (tmp_path / name).touch()
    two_ranks.save(tmp_path, 1)
    assert leftovers(tmp_path) == theirs


def test_withdraw_when_the_manifest_is_damaged_then_nothing_is_removed(
    tmp_path: Path, two_ranks: Numbered
) -> None:
    two_ranks.save(tmp_path, 1)
    save_id = read_manifest(tmp_path).save_id
    (tmp_path / "manifest.json").write_text("{")
    before = sorted(tmp_path.iterdir())
    withdraw(tmp_path, save_id)
    assert sorted(tmp_path.iterdir()) == before


def test_commit_when_a_file_was_cut_off_meanwhile_then_it_is_named_and_the_old_checkpoint_stays(
    tmp_path: Path, reader: World
) -> None:
    one = Numbered(World.of(TINY))
    one.save(tmp_path, 1)
    saver = savings(one.become(2).world, tmp_path, new_save_id())[0]
    part = saver.write(contribution_of(one.world.ranks[0].model))
    file = part.files[0]
    os.truncate(tmp_path / file.name, 100)
    assert_says(
        refused(CheckpointError, lambda: saver.commit(part)),
        f"File {tmp_path / file.name} has 100 bytes, and its rank wrote {file.nbytes}. Let no "
        "other program write or remove files there.",
    )
    saver.abandon()
    assert number_in(tmp_path, reader) == 1 and leftovers(tmp_path) == set()


@pytest.mark.parametrize("twice", [True, False])
def test_commit_when_ranks_wrote_the_same_elements_then_it_is_refused(
    tmp_path: Path, twice: bool
) -> None:
    """Also where as many are missing as are there twice."""
    two = Numbered(World.of((Param("w", (4, 3)),), dp=2))
    by_rank = savings(two.world, tmp_path, new_save_id())
    parts = [each.write(contribution_of(two.world.ranks[each.rank].model)) for each in by_rank]
    wrong = [parts[0], parts[1], parts[1]] if twice else [parts[0], parts[0]]
    got = "18 of its 12 elements" if twice else "some of its 12 elements were written twice"
    assert_mentions(
        refused(CheckpointError, lambda: folder.commit(tmp_path, wrong)),
        "'exp_avg/w'",
        got,
        "Give each param of the model a name of its own",
    )
    assert not is_checkpoint(tmp_path)


def test_saves_when_the_file_system_has_no_locks_then_the_first_to_commit_stays(
    tmp_path: Path, reader: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert disk.lock(lock_file(tmp_path)) is None
    one = Numbered(World.of(TINY))
    both = []
    for number in (1, 2):
        saver = savings(one.become(number).world, tmp_path, new_save_id())[0]
        both.append((saver, saver.write(contribution_of(one.world.ranks[0].model))))
    (first, first_part), (second, second_part) = both
    second.commit(second_part)
    with pytest.raises(CheckpointError, match="not there"):
        first.commit(first_part)
    first.abandon()
    assert number_in(tmp_path, reader) == 2 and leftovers(tmp_path) == set()


def test_lock_when_a_process_was_forked_meanwhile_then_it_is_free_again(tmp_path: Path) -> None:
    held = disk.lock(lock_file(tmp_path))
    end, keep = os.pipe()
    child = os.fork()
    if not child:
        os.close(keep)
        os.read(end, 1)  # until the parent closes it, as a data loader that outlives a save
        os._exit(0)
    try:
        disk.unlock(held)
        disk.unlock(disk.lock(lock_file(tmp_path)))
    finally:
        os.close(keep)
        os.close(end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_folder_when_it_cannot_be_synced_then_only_a_failing_disk_is_an_error(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            disk.sync_folder(tmp_path)
    else:
        disk.sync_folder(tmp_path)
