"""Checkpoints that are damaged, of another model or in somebody's way: each is refused by its exact text."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt.checkpoint import disk, load_checkpoint, save_checkpoint, tensor_file
from megatron_distopt.checkpoint.folder import read_manifest
from megatron_distopt.checkpoint.manifest import Manifest, from_text
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError, RanksDisagreeError
from tests.support.refusals import assert_says
from tests.support.simulated import Param, World
from tests.support.spawn import RankError, run_ranks
from tests.support.stored import TINY, Numbered, is_same, leftovers, number_in, snapshot

ONE_RANK = Group(None, 0, 1)
DAMAGED = "Load an earlier checkpoint; this one was damaged after it was written."
OF_ANOTHER_MODEL = "Load a checkpoint of this model, or start from its weights with a new optimizer."
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that two ranks wrote."""
    place = tmp_path / "checkpoint"
    Numbered(World.of(TINY, dp=2)).save(place, 1)
    return place


@pytest.fixture(scope="module")
def running() -> World:
    """A run of one rank with another state."""
    return Numbered(World.of(TINY)).become(7).world


def load(folder: Path, world: World) -> None:
    load_checkpoint(folder, world.ranks[0].model, ONE_RANK)


def refused(folder: Path, world: World) -> str:
    """The text; the run is as it was."""
    before = snapshot(world)
    with pytest.raises(CheckpointError) as caught:
        load(folder, world)
    assert is_same(snapshot(world), before), "a load that was refused has changed the state"
    return str(caught.value)


def files_of(folder: Path) -> list[Path]:
    return [folder / file.name for file in read_manifest(folder).files]


def edit(folder: Path, change: Change) -> None:
    """Somebody writes another manifest, with the checksum that belongs to it."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document["body"])
    canonical = json.dumps(document["body"], separators=(",", ":"), sort_keys=True)
    path.write_text(json.dumps({**document, "crc32": zlib.crc32(canonical.encode())}))


def test_load_when_nothing_is_damaged_then_the_state_is_the_saved_one(folder: Path) -> None:
    world = World.of(TINY)
    load(folder, world)
    assert is_same(snapshot(world), snapshot(Numbered(World.of(TINY)).become(1).world))


def test_load_when_a_file_is_missing_then_it_is_named(folder: Path, running: World) -> None:
    path = files_of(folder)[1]
    path.unlink()
    assert_says(
        refused(folder, running),
        f"Invalid file {path}: [Errno 2] No such file or directory: '{path}'. Must be readable. {DAMAGED}",
    )


@pytest.mark.parametrize("change", [-1, 1, -10_000])
def test_load_when_a_file_is_too_short_or_long_then_it_is_named(folder: Path, running: World, change: int) -> None:
    path = files_of(folder)[1]
    nbytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(nbytes + change)
    assert_says(
        refused(folder, running), f"Invalid file {path}: {nbytes + change} bytes. Must have {nbytes} bytes. {DAMAGED}"
    )


def test_load_when_any_bit_of_a_file_is_flipped_then_the_file_is_named(folder: Path, running: World) -> None:
    chance = random.Random(7)
    for path in files_of(folder):
        content = path.read_bytes()
        positions = {0, len(content) - 1, *chance.sample(range(len(content)), 60)}
        for position in sorted(positions):
            flipped = bytearray(content)
            flipped[position] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            found, wanted = f"{zlib.crc32(flipped):08x}", f"{zlib.crc32(content):08x}"
            assert_says(refused(folder, running), f"Invalid file {path}: CRC-32 {found}. Must have {wanted}. {DAMAGED}")
        path.write_bytes(content)
    load(folder, World.of(TINY))


def test_manifest_when_any_bit_is_flipped_then_it_is_refused_or_says_the_same(folder: Path, running: World) -> None:
    path = folder / "manifest.json"
    content, whole = path.read_bytes(), read_manifest(folder)
    chance, same = random.Random(8), 0
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            found: Manifest | None = read_manifest(folder)
        except CheckpointError as error:
            assert str(path) in str(error) or str(folder) in str(error)
            found = None
        assert found in (None, whole), f"bit of byte {position}: {flipped[position]:c}"
        same += found is not None
    assert same < 5, "an exponent may be written as e or E; nothing else means the same"
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert "CRC-32" in refused(folder, running)


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_load_when_the_manifest_is_cut_off_then_it_is_refused(folder: Path, running: World, keep: int) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:keep])
    with pytest.raises(json.JSONDecodeError) as parsed:
        json.loads(path.read_text())
    text = f"Invalid manifest {path}: {parsed.value!r} while reading it. Must be one JSON document. {DAMAGED}"
    assert_says(refused(folder, running), text)


def test_load_when_the_manifest_is_missing_then_there_is_no_checkpoint(folder: Path, running: World) -> None:
    (folder / "manifest.json").unlink()
    assert_says(
        refused(folder, running),
        f"Invalid checkpoint {folder}: no finished checkpoint. Must hold manifest.json. "
        "Load an earlier checkpoint, or start from the model's weights alone.",
    )


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "null", '"a"', '{"format": 1, "version": 1, "body": 0}'])
def test_manifest_when_it_is_another_document_then_it_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"Invalid manifest somewhere/manifest\.json: "):
        from_text(text, "somewhere/manifest.json")


@pytest.mark.parametrize("version", [2, 0, "1", None, 1.5])
def test_load_when_the_manifest_is_of_another_version_then_that_is_said(
    folder: Path, running: World, version: object
) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    assert_says(
        refused(folder, running),
        f"Invalid manifest {path}: format 'megatron_distopt' of version {version!r}. "
        "Must be 'megatron_distopt' of version 1 to 1. Load it with the version of megatron-distopt that wrote it.",
    )


def rename_file(name: str) -> Change:
    def change(body: dict[str, Any]) -> None:
        body["files"][0][0] = name

    return change


def set_chunk(index: int, value: object) -> Change:
    """Of the first chunk of main/w: [offsets, sizes, file, start, nbytes]."""

    def change(body: dict[str, Any]) -> None:
        body["tensors"]["main/w"][2][0][index] = value

    return change


def set_tensor(index: int, value: object) -> Change:
    def change(body: dict[str, Any]) -> None:
        body["tensors"]["main/w"][index] = value

    return change


def add_a_chunk(body: dict[str, Any]) -> None:
    body["tensors"]["main/w"][2].append([[1, 0], [2, 1], 0, 0, 10])


FORGED: dict[str, tuple[Change, str]] = {
    "above": (rename_file("../elsewhere"), "ValueError(\"'../elsewhere' is no file name\")"),
    "absolute": (rename_file("/etc/hostname"), "ValueError(\"'/etc/hostname' is no file name\")"),
    "backslash": (rename_file("a\\b"), "ValueError(\"'a\\\\\\\\b' is no file name\")"),
    "nul": (rename_file("a\0b"), "ValueError(\"'a\\\\x00b' is no file name\")"),
    "hidden": (rename_file(".metadata"), "ValueError(\"'.metadata' is no file name\")"),
    "nameless": (rename_file(""), "ValueError(\"'' is no file name\")"),
    "dtype": (set_tensor(1, "load"), "ValueError(\"'load' is no dtype\")"),
    "overlap": (
        add_a_chunk,
        "ValueError('Box(offsets=(0, 0), sizes=(2, 3)) and Box(offsets=(1, 0), sizes=(2, 1)) of main/w overlap')",
    ),
    "outside of the shape": (
        set_chunk(0, [4, 0]),
        "ValueError('Box(offsets=(4, 0), sizes=(2, 3)) of main/w lies outside of its shape [5, 3]')",
    ),
    "outside of the file": (set_chunk(4, 10**9), "ValueError('main/w lies outside of FILE')"),
    "before the file": (set_chunk(3, -1), "ValueError('main/w lies outside of FILE')"),
    "no such file": (set_chunk(2, 2), "IndexError('tuple index out of range')"),
    "file -1": (set_chunk(2, -1), "ValueError('main/w lies outside of OTHER')"),
    "endless": (set_tensor(0, [float("inf"), 3]), "OverflowError('cannot convert float infinity to integer')"),
    "no tensors": (lambda body: body.pop("tensors"), "KeyError('tensors')"),
}


@pytest.mark.parametrize("case", FORGED)
def test_load_when_the_manifest_cannot_be_true_then_it_is_refused(folder: Path, running: World, case: str) -> None:
    change, got = FORGED[case]
    edit(folder, lambda body: None)
    load(folder, World.of(TINY))
    first, second = files_of(folder)
    edit(folder, change)
    got = got.replace("FILE", first.name).replace("OTHER", second.name)
    assert_says(
        refused(folder, running),
        f"Invalid manifest {folder}/manifest.json: {got} while reading it. Must follow docs/checkpoint.md. {DAMAGED}",
    )


def test_load_when_chunks_are_missing_then_the_tensor_is_named(folder: Path, running: World) -> None:
    edit(folder, lambda body: body["tensors"]["exp_avg/w"][2].pop(0))
    assert_says(
        refused(folder, running),
        f"Invalid tensor 'exp_avg/w' in checkpoint {folder}: 9 elements of Box(offsets=(0, 0), sizes=(5, 3)). "
        f"Must hold all 15, each once. {OF_ANOTHER_MODEL}",
    )


def test_load_when_as_many_elements_are_there_twice_as_are_missing_then_their_sum_does_not_hide_it(
    folder: Path, running: World
) -> None:
    def change(body: dict[str, Any]) -> None:
        chunks = body["tensors"]["main/w"][2]
        assert [chunk[:2] for chunk in chunks[-2:]] == [[[2, 2], [1, 1]], [[3, 0], [2, 3]]]
        chunks[-2:] = [[[1, 0], [1, 1], *chunks[-2][2:]], chunks[-1]]

    edit(folder, change)
    assert "overlap" in refused(folder, running)


OTHER_MODELS: dict[str, tuple[tuple[Param, ...], str]] = {
    "one more": (
        (*TINY, Param("bias", (2,))),
        f"Invalid checkpoint FOLDER: without param 'bias'. Must hold the params of the run. {OF_ANOTHER_MODEL}",
    ),
    "one less": (
        TINY[:1],
        "Invalid checkpoint FOLDER: 'norm', which the model does not have. Must hold the params of the run. "
        + OF_ANOTHER_MODEL,
    ),
    "another shape": (
        (Param("w", (3, 5)), TINY[1]),
        "Invalid tensor 'main/w' in checkpoint FOLDER: of shape [5, 3]. Must have the shape [3, 5] of the run. "
        + OF_ANOTHER_MODEL,
    ),
    "other groups": (
        (TINY[0], Param("norm", (3,), dtype=torch.float32)),
        "Invalid param groups in checkpoint FOLDER: 'w' and 'norm' in different groups. Must have been in groups of "
        "equal options, because they are in one here. Build the optimizer with the param groups of the saved run.",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_load_when_the_checkpoint_is_of_another_model_then_the_param_is_named(folder: Path, case: str) -> None:
    params, text = OTHER_MODELS[case]
    assert_says(refused(folder, World.of(params)), text.replace("FOLDER", str(folder)))


def test_load_when_a_moment_is_missing_then_the_param_is_named(folder: Path, running: World) -> None:
    edit(folder, lambda body: body["tensors"].pop("exp_avg_sq/norm"))
    assert_says(
        refused(folder, running),
        f"Invalid state of 'norm' in checkpoint {folder}: exp_avg besides the param. "
        "Must hold exp_avg, exp_avg_sq for torch_fused. "
        "Resume with the optimizer of the saved run, or start from its weights with a new optimizer.",
    )


def test_load_when_more_lies_in_the_folder_then_it_is_not_read(folder: Path) -> None:
    for name in ("01234567-00000.distcp", "01234567-00000.part", "notes.txt", "01234567-manifest.json.new"):
        (folder / name).write_bytes(b"\x80")
    (folder / ".metadata").unlink()
    load(folder, World.of(TINY))


def test_load_when_a_file_goes_after_it_was_verified_then_it_is_named(
    folder: Path, running: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files_of(folder)[0]
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def fail(self: TensorReader, path: Path) -> None:
        raise gone

    monkeypatch.setattr(TensorReader, "__init__", fail)
    with pytest.raises(CheckpointError) as caught:
        load(folder, running)
    assert_says(
        str(caught.value),
        f"Invalid file {path}: {gone}. Must stay as it is while it is read. "
        "Start the run again: its state is loaded in part.",
    )


class Sluggish(io.FileIO):
    """Reads a few bytes at a time, as Linux does beyond 2 GiB."""

    def readinto(self, buffer: Any) -> int | None:
        return super().readinto(memoryview(buffer)[:7])


def test_load_when_the_system_reads_less_than_it_was_asked_for_then_the_rest_is_read_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "open", lambda path, mode, buffering: Sluggish(path), raising=False)
    assert number_in(folder, World.of(TINY)) == 1


@dataclass(frozen=True)
class Saved:
    """A run whose save is refused."""

    folder: Path
    world: World

    def refused(self) -> str:
        """The text; the run is as it was and the old checkpoint alone is in the folder."""
        before = snapshot(self.world)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(self.folder, self.world.ranks[0].model, ONE_RANK)
        assert is_same(snapshot(self.world), before)
        return str(caught.value)


def test_save_when_the_folder_cannot_be_written_then_the_file_is_named(
    folder: Path, running: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the call itself refuses."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(disk, "create", refuse)
    monkeypatch.setattr("megatron_distopt.checkpoint.save.new_save_id", lambda: "01234567")
    path = folder / "01234567-00000.distcp"
    assert_says(
        Saved(folder, running).refused(),
        f"Invalid file {path}: [Errno 13] Permission denied: '{path}'. Must be writable. "
        "Free space there, or save elsewhere; the last checkpoint is untouched.",
    )
    assert number_in(folder, World.of(TINY)) == 1 and leftovers(folder) == set()


def test_save_when_the_folder_cannot_be_made_then_it_is_named(tmp_path: Path, running: World) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "iter_0000001"
    assert_says(
        Saved(place, running).refused(),
        f"Invalid checkpoint {place}: [Errno 20] Not a directory: '{place}'. Must be a folder that can be written. "
        "Free space there, or give another folder.",
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", place], check=True)


def test_save_when_the_disk_is_full_then_the_file_is_named_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    params = (Param("w", (416, 416)), Param("norm", (3,), decays=False))  # 2 MB
    world, place = World.of(params), small_disk / "checkpoint"
    place.mkdir()
    world.save(place)
    saved = read_manifest(place)
    # The second tensor does not fit; or the last bytes do not, which are in a buffer until the file is synced.
    for missing_nbytes, rule in ((1_400_000, "take 'exp_avg/w'"), (32_000, "be writable")):
        (small_disk / "other").write_bytes(b"")
        free = os.statvfs(small_disk)
        room = saved.files[0].nbytes - missing_nbytes
        (small_disk / "other").write_bytes(bytes(free.f_bavail * free.f_bsize - room))
        text = Saved(place, world).refused()
        file = text.split()[2].removesuffix(":")
        assert_says(
            text,
            f"Invalid file {file}: [Errno 28] No space left on device. Must {rule}. "
            "Free space there, or save elsewhere; the last checkpoint is untouched.",
        )
        assert read_manifest(place) == saved and leftovers(place) == set() and not Path(file).exists()
        world.load(place)
    (small_disk / "other").unlink()
    save_checkpoint(place, world.ranks[0].model, ONE_RANK)
    assert read_manifest(place) != saved and leftovers(place) == set()


def test_save_when_another_process_is_saving_there_then_it_is_refused_and_the_other_unharmed(
    folder: Path, running: World
) -> None:
    """The other one is held between its last file and the commit."""
    (in_commit, tell_parent), (may_go_on, let_go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            make_wait_in_commit(tell_parent, may_go_on)
            Numbered(World.of(TINY, dp=2)).save(folder, 2)
            os._exit(0)
        finally:
            os._exit(1)
    os.read(in_commit, 1)
    assert_says(
        Saved(folder, running).refused(),
        f"Invalid checkpoint {folder}: another run is saving there now. Must be written by one run at a time. "
        "Give each run a folder of its own.",
    )
    assert number_in(folder, World.of(TINY)) == 1
    os.write(let_go, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert number_in(folder, World.of(TINY)) == 2 and leftovers(folder) == set()
    save_checkpoint(folder, running.ranks[0].model, ONE_RANK)


def make_wait_in_commit(tell_parent: int, may_go_on: int) -> None:
    replace = disk.replace

    def waiting(source: Path, target: Path) -> None:
        if target.name == "manifest.json":
            os.write(tell_parent, b"x")
            os.read(may_go_on, 1)
        replace(source, target)

    disk.replace = waiting


def on_two_ranks(rank: int, size: int, folder: Path, results: Path) -> None:
    """What each rank was told, in a file of its own: the last case ends rank 1."""
    everyone, said = Group.of(), []
    world = World.of(TINY, dp=size)
    mine = World(world.params, 1, (world.ranks[rank],))

    def try_it(action: Callable[[], None]) -> None:
        before = snapshot(mine)
        try:
            action()
        except Exception as error:  # noqa: BLE001 - it is what is compared
            said.append([type(error).__name__, str(error), is_same(snapshot(mine), before)])
        (results / str(rank)).write_text(json.dumps(said))

    damaged = files_of(folder)[1]
    content = damaged.read_bytes()
    if rank == 0:
        damaged.write_bytes(content[:-1] + b"x")
    everyone_is_here(everyone)
    try_it(lambda: load_checkpoint(folder, mine.ranks[0].model, everyone))
    everyone_is_here(everyone)
    if rank == 0:
        damaged.write_bytes(content)
    if rank == 1:
        disk.write = no_space  # type: ignore[assignment]
    try_it(lambda: save_checkpoint(folder, mine.ranks[0].model, everyone))
    if rank == 1:
        disk.write = lambda file, data: os.kill(os.getpid(), signal.SIGKILL)
    try_it(lambda: save_checkpoint(folder, mine.ranks[0].model, everyone))


def everyone_is_here(everyone: Group) -> None:
    torch.distributed.barrier(everyone.handle)


def no_space(file: object, data: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_ranks_when_one_of_them_fails_or_dies_then_all_stop_and_the_old_checkpoint_stays(
    folder: Path, tmp_path: Path
) -> None:
    damaged = files_of(folder)[1]
    crc32 = zlib.crc32(damaged.read_bytes())
    with pytest.raises(RankError, match=r"no result on ranks \[1\]; exit codes {1: -9}"):
        run_ranks(on_two_ranks, 2, folder, tmp_path)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert [name for name, _, _ in first[:2]] == [RanksDisagreeError.__name__] * 2
    assert [name for name, _, _ in second] == [CheckpointError.__name__] * 2
    assert all(is_unchanged for _, _, is_unchanged in first + second)
    assert second[0][1].startswith(f"Invalid file {damaged}: CRC-32 ")
    assert second[0][1].endswith(f". Must have {crc32:08x}. {DAMAGED}")
    assert "[Errno 28] No space left on device. Must take 'main/" in second[1][1]
    for theirs, ours in zip(first, second, strict=False):
        assert theirs[1] in [
            f"Invalid {what}: rank 1 refused with «{ours[1]}». Must pass on all 2 ranks. Mend what that rank reports."
            for what in ("load", "save")
        ]
    assert len(first) == 3 and "peer" in first[2][1]
    assert number_in(folder, World.of(TINY)) == 1
    assert all(name.endswith("-00001.distcp") for name in leftovers(folder))
