"""Files of a checkpoint that somebody wrote to have code executed: nothing is, and the text says which file it is."""

from __future__ import annotations

import ast
import json
import os
import pickle
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_distopt
from megatron_distopt.checkpoint import load_checkpoint
from megatron_distopt.checkpoint.folder import new_save_id, read_manifest
from megatron_distopt.checkpoint.save import contribution_of
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from tests.support.refusals import assert_says
from tests.support.simulated import World
from tests.support.stored import TINY, Numbered, is_same, leftovers, number_in, savings, snapshot

DAMAGED = "Load an earlier checkpoint; this file is damaged."


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file; this one works."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(Evil(path)))
    path.unlink()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint"
    Numbered(World.of(TINY)).save(place, 1)
    return place


def refused(folder: Path, marker: Path) -> str:
    """The text; nothing was executed and the run is as it was."""
    world = Numbered(World.of(TINY)).become(7).world
    before = snapshot(world)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, world.ranks[0].model, Group(None, 0, 1))
    assert not marker.exists(), "the load has executed what a file says"
    assert is_same(snapshot(world), before)
    return str(caught.value)


def replace_first_tensor(folder: Path, content: bytes) -> Path:
    """Puts bytes in place of the first tensor of the file, with the sizes and checksums that belong to them."""
    manifest = read_manifest(folder)
    path = folder / manifest.files[0].name
    document = json.loads((folder / "manifest.json").read_text())
    body = document["body"]
    first = next(chunk for _, _, chunks in body["tensors"].values() for chunk in chunks if chunk[3] == 0)
    whole = content + path.read_bytes()[first[4] :]
    for _, _, chunks in body["tensors"].values():
        for chunk in chunks:
            chunk[3] += (len(content) - first[4]) if chunk is not first else 0
    first[4] = len(content)
    body["files"] = [[path.name, len(whole), zlib.crc32(whole)]]
    path.write_bytes(whole)
    canonical = json.dumps(body, separators=(",", ":"), sort_keys=True)
    (folder / "manifest.json").write_text(json.dumps({**document, "crc32": zlib.crc32(canonical.encode())}))
    return path


def saved(value: object, **how: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_load_when_the_manifest_is_a_pickle_then_nothing_is_executed(folder: Path, marker: Path, protocol: int) -> None:
    path = folder / "manifest.json"
    path.write_bytes(pickle.dumps(Evil(marker), protocol=protocol))
    if protocol == 0:
        assert_says(
            refused(folder, marker),
            f"Invalid manifest {path}: JSONDecodeError('Expecting value: line 1 column 1 (char 0)') while reading it. "
            "Must be one JSON document. Load an earlier checkpoint; this one was damaged after it was written.",
        )
    else:
        assert_says(
            refused(folder, marker),
            f"Invalid checkpoint {folder}: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte. "
            "Must hold manifest.json. "
            "Load an earlier checkpoint, or start from the model's weights alone.",
        )


def test_load_and_save_when_metadata_is_a_malicious_pickle_then_it_is_not_read(folder: Path, marker: Path) -> None:
    evil = pickle.dumps(Evil(marker))
    (folder / ".metadata").write_bytes(evil)
    assert number_in(folder, World.of(TINY)) == 1
    Numbered(World.of(TINY)).save(folder, 2)
    assert number_in(folder, World.of(TINY)) == 2
    assert not marker.exists()
    assert (folder / ".metadata").read_bytes() != evil


def test_load_when_a_file_of_tensors_is_a_pickle_then_nothing_is_executed(folder: Path, marker: Path) -> None:
    path = folder / read_manifest(folder).files[0].name
    nbytes, evil = path.stat().st_size, pickle.dumps(Evil(marker))
    path.write_bytes(evil)
    assert_says(
        refused(folder, marker),
        f"Invalid file {path}: {len(evil)} bytes. Must have {nbytes} bytes. "
        "Load an earlier checkpoint; this one was damaged after it was written.",
    )
    path.write_bytes(evil.ljust(nbytes, b"."))
    assert "CRC-32" in refused(folder, marker)


def test_load_when_a_pickle_takes_the_place_of_a_tensor_then_nothing_is_executed(folder: Path, marker: Path) -> None:
    path = replace_first_tensor(folder, pickle.dumps(Evil(marker), protocol=2))
    assert_says(
        refused(folder, marker),
        f"Invalid tensor 'main/norm' in {path}: it begins with b'\\x80\\x02cp' and not as torch.save begins. "
        f"Must be readable. {DAMAGED}",
    )


def test_load_when_a_tensor_is_in_an_older_format_of_torch_then_it_is_not_opened(folder: Path, marker: Path) -> None:
    path = replace_first_tensor(folder, saved(Evil(marker), _use_new_zipfile_serialization=False))
    assert_says(
        refused(folder, marker),
        f"Invalid tensor 'main/norm' in {path}: it begins with b'\\x80\\x02\\x8a\\n' and not as torch.save begins. "
        f"Must be readable. {DAMAGED}",
    )


@pytest.mark.parametrize("is_nested", [False, True])
def test_load_when_a_tensor_is_an_object_with_code_then_nothing_is_executed(
    folder: Path, marker: Path, is_nested: bool
) -> None:
    evil = Evil(marker)
    path = replace_first_tensor(folder, saved([torch.zeros(3), {"state": evil}] if is_nested else evil))
    assert_says(
        refused(folder, marker),
        f"Invalid tensor 'main/norm' in {path}: more than a tensor. Must be one and execute nothing. {DAMAGED}",
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_load_when_a_tensor_is_a_program_of_torchscript_then_it_is_refused(folder: Path, marker: Path) -> None:
    file = BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), file)
    path = replace_first_tensor(folder, file.getvalue())
    assert refused(folder, marker).startswith(f"Invalid tensor 'main/norm' in {path}: ")


@pytest.mark.parametrize(
    "value, got",
    [({"w": 1}, "dict"), (torch.zeros(2), "torch.float32 [2]"), (torch.zeros(3).half(), "torch.float16 [3]")],
)
def test_load_when_a_tensor_is_something_else_then_that_is_said(
    folder: Path, marker: Path, value: object, got: str
) -> None:
    path = replace_first_tensor(folder, saved(value))
    assert_says(
        refused(folder, marker),
        f"Invalid tensor 'main/norm' in {path}: {got}. Must be torch.float32 [3] as the manifest says. {DAMAGED}",
    )


@pytest.mark.parametrize("protocol", [0, 5])
def test_save_when_a_part_is_a_pickle_then_nothing_is_executed_and_the_old_checkpoint_stays(
    folder: Path, marker: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distopt.checkpoint.save._SECONDS_TO_APPEAR", 0.0)
    two = Numbered(World.of(TINY, dp=2)).become(2)
    by_rank = savings(two.world, folder, new_save_id())
    written = [each.write(contribution_of(rank.model)) for each, rank in zip(by_rank, two.world.ranks, strict=True)]
    part = folder / f"{by_rank[0].save_id}-00001.part"
    part.write_bytes(pickle.dumps(Evil(marker), protocol=protocol))
    with pytest.raises(CheckpointError) as caught:
        by_rank[0].commit(written[0])
    assert_says(
        str(caught.value),
        f"Invalid checkpoint {folder}: no file of rank 1 to be seen. Must be on a disk that all 2 ranks share. "
        "Give a folder on a shared disk.",
    )
    by_rank[0].abandon()
    assert not marker.exists()
    assert number_in(folder, World.of(TINY)) == 1 and leftovers(folder) == set()


def test_package_when_its_source_is_searched_then_nothing_unpickles_freely() -> None:
    found = 0
    for file in Path(megatron_distopt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("pickle.load", "pickle.loads", "torch.jit.load"), f"{file}:{node.lineno}"
            if called == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", f"{file}:{node.lineno}"
                found += 1
    assert found > 0, "the search finds nothing"
