"""One thing is broken in a checkpoint, a disk or a rank: it is named, nothing is executed, and the
state stays."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import pickle
import random
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_distopt
from megatron_distopt.checkpoint import disk, load_checkpoint, save_checkpoint, tensor_file
from megatron_distopt.checkpoint.folder import new_save_id, read_manifest
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.manifest_text import from_text
from megatron_distopt.checkpoint.save import contribution_of
from megatron_distopt.checkpoint.tensor_file import TensorReader
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError, RanksDisagreeError
from tests.support.fork_files import Trap
from tests.support.refusals import assert_mentions, assert_says
from tests.support.simulated import Param, World
from tests.support.spawn import RankError, run_ranks
from tests.support.stored import (
    TINY,
    Numbered,
    edit_manifest,
    leftovers,
    number_in,
    savings,
    snapshot,
)
from tests.support.values import same

ONE_RANK = Group(None, 0, 1)
DAMAGED = "Load an earlier checkpoint; this one was damaged after it was written."
FILE_DAMAGED = "Load an earlier checkpoint; this file is damaged."
OF_ANOTHER_MODEL = (
    "Load a checkpoint of this model, or start from its weights with a new optimizer."
)
#: Whoever unpickles it makes a file in the current folder.
EVIL = Trap("touch executed", os.system)
Break = Callable[[Path], object]
Change = Callable[[dict[str, Any]], object]


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


def refused(action: Callable[[], object], world: World) -> str:
    """The text; the run is as it was."""
    before = snapshot(world)
    with pytest.raises(CheckpointError) as caught:
        action()
    assert same(snapshot(world), before), "what was refused has changed the state"
    return str(caught.value)


def files_of(folder: Path) -> list[Path]:
    return [folder / file.name for file in read_manifest(folder).files]


# What is broken.


def manifest_is(content: bytes) -> Break:
    return lambda folder: (folder / "manifest.json").write_bytes(content)


def manifest_says(**head: object) -> Break:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **head}))

    return change


def edited(change: Change) -> Break:
    return lambda folder: edit_manifest(folder, change)


def file_renamed(name: str) -> Break:
    return edited(lambda body: body["files"][0].__setitem__(0, name))


def chunk_is(index: int, value: object) -> Break:
    """Of the first chunk of main/w: [offsets, sizes, file, start, nbytes]."""
    return edited(lambda body: body["tensors"]["main/w"][2][0].__setitem__(index, value))


def tensor_is(index: int, value: object) -> Break:
    """Of main/w: [shape, dtype, chunks]."""
    return edited(lambda body: body["tensors"]["main/w"].__setitem__(index, value))


def second_file_longer(nbytes: int) -> Break:
    return lambda folder: os.truncate(
        files_of(folder)[1], files_of(folder)[1].stat().st_size + nbytes
    )


def first_tensor_is(content: bytes) -> Break:
    """Bytes in place of the tensor that is read first, with the sizes and checksums that belong to
    them."""

    def replace(folder: Path) -> None:
        path = files_of(folder)[0]

        def change(body: dict[str, Any]) -> None:
            chunks = [
                chunk
                for _, _, all_chunks in body["tensors"].values()
                for chunk in all_chunks
                if chunk[2] == 0
            ]
            first = next(chunk for chunk in chunks if chunk[3] == 0)
            grown = len(content) - first[4]
            whole = content + path.read_bytes()[first[4] :]
            for chunk in chunks:
                chunk[3] += grown if chunk is not first else 0
            first[4] = len(content)
            body["files"][0] = [path.name, len(whole), zlib.crc32(whole)]
            path.write_bytes(whole)

        edited(change)(folder)

    return replace


def saved(value: object, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def program_of_torchscript(folder: Path) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), file)
    first_tensor_is(file.getvalue())(folder)


def in_manifest(got: str) -> str:
    return f"Manifest FOLDER/manifest.json does not follow docs/checkpoint.md: {got}. {DAMAGED}"


def of_version(version: object) -> tuple[Break, str]:
    return manifest_says(version=version), (
        f"Manifest FOLDER/manifest.json has format 'megatron_distopt' of version {version!r}, and "
        "this package reads version 1 to 1. Load it with the version of megatron-distopt that "
        "wrote it."
    )


NO_NAME = "ValueError(\"'{}' is not a file name\")"
FIRST_TENSOR = "Tensor 'main/norm' in FIRST "
NOT_TORCHS = (
    FIRST_TENSOR
    + "cannot be read: it begins with {}, with which torch.save never begins. "
    + FILE_DAMAGED
)
NO_TENSOR = FIRST_TENSOR + "is not one plain tensor. " + FILE_DAMAGED
OTHER_TENSOR = FIRST_TENSOR + "is {}, and must be torch.float32 [2]. " + FILE_DAMAGED
OUTSIDE = "ValueError('Box(offsets=(4, 0), sizes=(2, 3)) of main/w lies outside its shape [5, 3]')"
OVERLAP = (
    "ValueError('Box(offsets=(0, 0), sizes=(2, 3)) and Box(offsets=(1, 0), sizes=(2, 1)) of main/w "
    "overlap')"
)
#: What is done to the folder, and what the load says of it. FIRST and SECOND are the files of the
#: two ranks.
BROKEN: dict[str, tuple[Break, str]] = {
    "a file is missing": (
        lambda folder: files_of(folder)[1].unlink(),
        f"Cannot read file SECOND: [Errno 2] No such file or directory: 'SECOND'. {DAMAGED}",
    ),
    "a file is a byte shorter": (
        second_file_longer(-1),
        f"File SECOND has {{-1}} bytes, and must have {{0}}. {DAMAGED}",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "Checkpoint FOLDER holds no finished checkpoint, because there is no manifest.json. "
        "Load an earlier checkpoint, or start from the model's weights alone.",
    ),
    "the manifest is a pickle in text": (
        manifest_is(pickle.dumps(EVIL, protocol=0)),
        "Manifest FOLDER/manifest.json cannot be read as one JSON document: "
        f"JSONDecodeError('Expecting value: line 1 column 1 (char 0)'). {DAMAGED}",
    ),
    "the manifest is a pickle": (
        manifest_is(pickle.dumps(EVIL, protocol=5)),
        "Checkpoint FOLDER cannot be read: 'utf-8' codec can't decode byte 0x80 in position 0: "
        "invalid start byte. Load an earlier checkpoint, or start from the model's weights alone.",
    ),
    **{f"version {version!r}": of_version(version) for version in (2, "1")},
    **{
        f"file name {name!r}": (file_renamed(name), in_manifest(NO_NAME.format(shown)))
        for name, shown in {
            "../elsewhere": "../elsewhere",
            ".metadata": ".metadata",
            "": "",
        }.items()
    },
    "no dtype": (tensor_is(1, "load"), in_manifest("ValueError(\"'load' is not a dtype\")")),
    "chunks overlap": (
        edited(lambda body: body["tensors"]["main/w"][2].append([[1, 0], [2, 1], 0, 0, 10])),
        in_manifest(OVERLAP),
    ),
    "a chunk outside of the shape": (chunk_is(0, [4, 0]), in_manifest(OUTSIDE)),
    "a chunk outside of the file": (
        chunk_is(4, 10**9),
        in_manifest("ValueError('main/w lies outside NAME1')"),
    ),
    "a chunk in file -1": (chunk_is(2, -1), in_manifest("ValueError('main/w lies outside NAME2')")),
    "a chunk is missing": (
        edited(lambda body: body["tensors"]["exp_avg/w"][2].pop(0)),
        "Tensor 'exp_avg/w' in checkpoint FOLDER holds 9 elements of Box(offsets=(0, 0), "
        f"sizes=(5, 3)), and must hold all 15, each once. {OF_ANOTHER_MODEL}",
    ),
    "a moment is missing": (
        edited(lambda body: body["tensors"].pop("exp_avg_sq/norm")),
        "Checkpoint FOLDER has exp_avg of 'norm' besides the param, and torch_fused needs "
        "exp_avg, exp_avg_sq. Resume with the optimizer of the saved run, or start "
        "from its weights with a new optimizer.",
    ),
    "a tensor is a pickle": (
        first_tensor_is(pickle.dumps(EVIL, protocol=2)),
        NOT_TORCHS.format("b'\\x80\\x02cp'"),
    ),
    "a tensor in an older format of torch": (
        first_tensor_is(saved(EVIL, _use_new_zipfile_serialization=False)),
        NOT_TORCHS.format("b'\\x80\\x02\\x8a\\n'"),
    ),
    "a tensor is an object": (first_tensor_is(saved(EVIL)), NO_TENSOR),
    "a tensor is a program": (program_of_torchscript, FIRST_TENSOR),
    "a tensor is a dict": (first_tensor_is(saved({"w": 1})), OTHER_TENSOR.format("dict")),
    "a tensor has another shape": (
        first_tensor_is(saved(torch.zeros(3))),
        OTHER_TENSOR.format("torch.float32 [3]"),
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_load_when_one_thing_is_broken_then_it_is_named_and_nothing_is_executed(
    case: str, folder: Path, running: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    break_it, text = BROKEN[case]
    files = files_of(folder)
    nbytes = files[1].stat().st_size
    break_it(folder)
    for name, value in {"FOLDER": folder, "FIRST": files[0], "SECOND": files[1]}.items():
        text = text.replace(name, str(value))
    for number, path in enumerate(files, start=1):
        text = text.replace(f"NAME{number}", path.name)
    for change in (-1, 0):
        text = text.replace(f"{{{change}}}", str(nbytes + change))
    assert_says(refused(lambda: load(folder, running), running), text)
    assert not (tmp_path / "executed").exists(), "the load has executed what a file says"


def test_evil_when_unpickled_then_it_executes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(EVIL))
    assert (tmp_path / "executed").exists()


def test_load_and_save_when_metadata_is_a_malicious_pickle_then_it_is_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(EVIL))
    assert number_in(folder, World.of(TINY)) == 1
    Numbered(World.of(TINY)).save(folder, 2)
    assert number_in(folder, World.of(TINY)) == 2
    assert not (tmp_path / "executed").exists()
    assert (folder / ".metadata").read_bytes() != pickle.dumps(EVIL)


def test_load_when_any_bit_of_a_file_is_flipped_then_the_file_is_named(
    folder: Path, running: World
) -> None:
    chance = random.Random(7)
    for path in files_of(folder):
        content = path.read_bytes()
        positions = {0, len(content) - 1, *chance.sample(range(len(content)), 15)}
        for position in sorted(positions):
            flipped = bytearray(content)
            flipped[position] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            found, wanted = f"{zlib.crc32(flipped):08x}", f"{zlib.crc32(content):08x}"
            text = refused(lambda: load(folder, running), running)
            assert_says(
                text, f"File {path} has CRC-32 {found}, and must have CRC-32 {wanted}. {DAMAGED}"
            )
        path.write_bytes(content)
    load(folder, World.of(TINY))


def test_manifest_when_any_bit_is_flipped_then_it_is_refused_or_says_the_same(
    folder: Path, running: World
) -> None:
    path = folder / "manifest.json"
    content, whole = path.read_bytes(), read_manifest(folder)
    chance, same = random.Random(8), 0
    for position in range(0, len(content), 11):
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
    assert "CRC-32" in refused(lambda: load(folder, running), running)


DOCUMENTS = (
    "[" * 100_000,
    "[]",
    "{}",
    "null",
    '"a"',
    '{"format": 1, "version": 1, "body": 0}',
    "",
    '{"f',
)


def test_manifest_when_it_is_another_document_then_it_is_refused() -> None:
    for text in DOCUMENTS:
        with pytest.raises(CheckpointError, match=r"^Manifest somewhere/manifest\.json "):
            from_text(text, "somewhere/manifest.json")


OTHER_MODELS: dict[str, tuple[tuple[Param, ...], str]] = {
    "one more": (
        (*TINY, Param("bias", (2,))),
        f"Checkpoint FOLDER has no param 'bias', which this run updates. {OF_ANOTHER_MODEL}",
    ),
    "one less": (
        TINY[:1],
        f"Checkpoint FOLDER has 'norm', which the model does not have. {OF_ANOTHER_MODEL}",
    ),
    "another shape": (
        (Param("w", (3, 5)), TINY[1]),
        "Tensor 'main/w' in checkpoint FOLDER has shape [5, 3], and the run needs shape [3, 5]. "
        + OF_ANOTHER_MODEL,
    ),
    "other groups": (
        (TINY[0], Param("norm", (3,), dtype=torch.float32)),
        "In checkpoint FOLDER, 'w' and 'norm' are in groups of different options. Build the "
        "optimizer with the param groups of the saved run.",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_load_when_the_checkpoint_is_of_another_model_then_the_param_is_named(
    folder: Path, case: str
) -> None:
    params, text = OTHER_MODELS[case]
    world = World.of(params)
    assert_says(refused(lambda: load(folder, world), world), text.replace("FOLDER", str(folder)))


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
        f"Cannot read file {path}: {gone}. Start the run again, because its state is loaded only "
        "in part.",
    )


class Sluggish(io.FileIO):
    """Reads a few bytes at a time, as Linux does beyond 2 GiB."""

    def readinto(self, buffer: Any) -> int | None:
        return super().readinto(memoryview(buffer)[:7])


def test_load_when_the_system_reads_less_than_it_was_asked_for_then_the_rest_is_read_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tensor_file, "open", lambda path, mode, buffering: Sluggish(path), raising=False
    )
    assert number_in(folder, World.of(TINY)) == 1


# Saving.


def test_save_when_a_part_is_a_pickle_then_nothing_is_executed_and_the_old_checkpoint_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_distopt.checkpoint.save._SECONDS_TO_APPEAR", 0.0)
    two = Numbered(World.of(TINY, dp=2)).become(2)
    by_rank = savings(two.world, folder, new_save_id())
    written = [
        each.write(contribution_of(rank.model))
        for each, rank in zip(by_rank, two.world.ranks, strict=True)
    ]
    part = folder / f"{by_rank[0].save_id}-00001.part"
    assert part.exists()
    part.write_bytes(pickle.dumps(EVIL, protocol=0))
    with pytest.raises(CheckpointError) as caught:
        by_rank[0].commit(written[0])
    assert_says(
        str(caught.value),
        f"No file of rank 1 has appeared in checkpoint {folder}, which must be on a disk that all "
        "2 ranks share. Give a folder on a shared disk.",
    )
    by_rank[0].abandon()
    assert not (tmp_path / "executed").exists()
    assert number_in(folder, World.of(TINY)) == 1 and leftovers(folder) == set()


def test_package_when_its_source_is_searched_then_nothing_unpickles_freely() -> None:
    found = 0
    for file in Path(megatron_distopt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("pickle.load", "pickle.loads", "torch.jit.load"), (
                f"{file}:{node.lineno}"
            )
            if called == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", f"{file}:{node.lineno}"
                found += 1
    assert found > 0, "the search finds nothing"


def save_refused(folder: Path, world: World) -> str:
    return refused(lambda: save_checkpoint(folder, world.ranks[0].model, ONE_RANK), world)


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
        save_refused(folder, running),
        f"Cannot write file {path}: [Errno 13] Permission denied: '{path}'. "
        "Free space there, or save elsewhere; the last checkpoint is untouched.",
    )
    assert number_in(folder, World.of(TINY)) == 1 and leftovers(folder) == set()


def test_save_when_the_folder_cannot_be_made_then_it_is_named(
    tmp_path: Path, running: World
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "iter_0000001"
    assert_says(
        save_refused(place, running),
        f"Cannot write checkpoint {place}: [Errno 20] Not a directory: '{place}'. "
        "Free space there, or save elsewhere.",
    )


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
            said.append([type(error).__name__, str(error), same(snapshot(mine), before)])
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
    assert_mentions(second[0][1], str(damaged), f"CRC-32 {crc32:08x}", DAMAGED)
    assert_mentions(second[1][1], "'main/", "[Errno 28] No space left on device")
    for what, theirs, ours in zip(("load", "save"), first, second, strict=False):
        assert_mentions(theirs[1], what, f"rank 1 raised «{ours[1]}»", "all 2 ranks")
    assert len(first) == 3 and "peer" in first[2][1]
    assert number_in(folder, World.of(TINY)) == 1
    assert all(name.endswith("-00001.distcp") for name in leftovers(folder))
