"""The commands on checkpoints: what they print at which width, what they find, and with which status they end."""

from __future__ import annotations

import io
import json
import math
import os
import pickletools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megatron_distopt.checkpoint import MANIFEST, read_manifest
from megatron_distopt.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, kind_of, name_of, to_text
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.checkpoint.source import Source, open_checkpoint, write_checkpoint
from megatron_distopt.cli import convert as convert_command
from megatron_distopt.cli import main as cli
from megatron_distopt.cli import show
from megatron_distopt.cli.checks import box_text, check_chunks, stored_in
from megatron_distopt.cli.diff import compare
from megatron_distopt.cli.inspect import Param, tree_of
from megatron_distopt.cli.main import FORMATS
from megatron_distopt.cli.show import progress_of, size_text
from megatron_distopt.cli.verify import non_finite
from megatron_distopt.formats import TARGETS
from megatron_distopt.layout import Box
from megatron_distopt.version import VERSION
from tests.support.simulated import World, small_model

Output = pytest.CaptureFixture[str]
ITERATION = "iter_0000100"
EMBEDDING = "embedding.word_embeddings.weight"
QKV = "decoder.layers.2.self_attention.linear_qkv.weight"
RULE = "Must be a folder with manifest.json, an iteration, or the --save folder of a run."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --save folder with one iteration, written by 2 x 2 ranks."""
    root = tmp_path_factory.mktemp("run")
    World.of(small_model(), dp=2, tp=2).save(root / ITERATION / "distrib_optim.distopt")
    (root / "latest_checkpointed_iteration.txt").write_text("100\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def whole(saved: Path) -> Path:
    """The folder of the checkpoint; not to be changed."""
    return saved / ITERATION / "distrib_optim.distopt"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """One that may be damaged."""
    shutil.copytree(whole, tmp_path / "copied")
    return tmp_path / "copied"


def run(capsys: Output, *words: str | Path) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of every line that is not empty."""
    return [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()]


def document(capsys: Output, *words: str | Path) -> tuple[int, dict[str, object]]:
    status, lines, _ = run(capsys, *words, "--json")
    return status, json.loads("\n".join(lines))


def rewritten(folder: Path, **changes: object) -> None:
    """With another manifest of the same files."""
    manifest = replace(read_manifest(folder), **changes)  # type: ignore[arg-type]
    (folder / MANIFEST).write_text(to_text(manifest), encoding="utf-8")


def changed(source: Source, change: Callable[[str, Tensor], Tensor]) -> Source:
    """With other values."""
    return replace(source, read_box=lambda key, box: change(key, source.read_box(key, box)))


def at_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(cli, "_width", lambda: width)


def test_inspect_when_asked_then_everything_in_one_look(whole: Path, capsys: Output) -> None:
    status, lines, err = run(capsys, "inspect", whole)
    assert (status, err) == (0, "")
    shown = cells(lines)
    for row in (
        ["where", str(whole)],
        ["written by", f"megatron_distopt {VERSION}, torch {torch.__version__}"],
        ["optimizer", "torch_fused"],
        ["steps", "10"],
        ["loss scale", "scale 1024, good_steps 0, tolerated 2"],
        ["size", "27 params, 2,373 elements, 27.8 KiB of state"],
        ["of each", "main, exp_avg, exp_avg_sq in float32"],
        ["0", "18 params, 2,220 elements, wd_mult 1, weight_decay 0.1"],
        ["1", "9 params, 153 elements, wd_mult 0, weight_decay 0"],
    ):
        assert row in shown
    text = "\n".join(lines)
    assert "lr 0.001, betas [0.9, 0.999], eps 1e-08" in text
    assert "decoder.layers.0-3: 4 alike, 24.3 KiB" in text
    assert "mlp.linear_fc2.weight  [6, 16], 96 elements, 1.1 KiB, group 0" in text
    assert "scale  [1], 1 element, 12 B, group 1" in text


@pytest.mark.parametrize("width", [80, 140])
def test_commands_when_the_terminal_has_a_width_then_no_line_is_wider(
    width: int, saved: Path, copied: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths: one that is longer than the terminal has to be wider."""
    at_width(monkeypatch, width)
    monkeypatch.chdir(tmp_path)
    (copied / read_manifest(copied).files[1].name).unlink()
    rewritten(copied, groups=read_manifest(copied).groups[:1], about={"host": "megatron-core", "tensor_parallel": 2})
    shutil.copytree(saved, "saved")
    write_checkpoint(
        Path("other"), changed(open_checkpoint(Path("saved") / ITERATION / "distrib_optim.distopt"), halved)
    )
    for words in (["inspect", "copied"], ["verify", "copied"], ["diff", "saved/" + ITERATION, "other"]):
        status, lines, _ = run(capsys, *words)
        assert max(map(len, lines)) <= width, words
        assert len(lines) > 10 and status == (words[0] != "inspect")


def halved(key: str, tensor: Tensor) -> Tensor:
    return tensor / 2


def test_inspect_when_json_then_one_document_with_all_tensors(saved: Path, whole: Path, capsys: Output) -> None:
    manifest = read_manifest(whole)
    status, found = document(capsys, "inspect", saved)
    assert (status, found["checkpoint"], found["chosen"]) == (0, str(whole), f"the latest in {saved}")
    assert found["loss_scale"] == {"scale": 1024.0, "good_steps": 0.0, "tolerated": 2.0}
    assert [group["step"] for group in found["groups"]] == [10, 10]  # type: ignore[attr-defined]
    assert found["tensors"].keys() == manifest.tensors.keys()  # type: ignore[attr-defined]
    files = [file.name for file in manifest.files]
    wanted = {"shape": [40, 6], "dtype": "float32", "nbytes": 960, "files": files[2:]}
    assert found["tensors"][f"main/{EMBEDDING}"] == wanted  # type: ignore[index]
    assert found["files"][0] == {  # type: ignore[index]
        "name": files[0],
        "nbytes": manifest.files[0].nbytes,
        "nbytes_found": manifest.files[0].nbytes,
        "crc32": manifest.files[0].crc32,
    }


@pytest.mark.parametrize("below", ["", "latest_checkpointed_iteration.txt"])
def test_inspect_when_given_all_of_a_run_then_the_latest_iteration_and_it_says_so(
    below: str, saved: Path, whole: Path, capsys: Output
) -> None:
    status, lines, _ = run(capsys, "inspect", saved / below)
    assert status == 0
    assert cells(lines)[1:3] == [["where", str(whole)], ["which", f"the latest in {saved}"]]


@pytest.mark.parametrize("below", [ITERATION, f"{ITERATION}/distrib_optim.distopt/{MANIFEST}"])
def test_inspect_when_given_another_path_of_it_then_the_same(
    below: str, saved: Path, whole: Path, capsys: Output
) -> None:
    assert run(capsys, "inspect", saved / below) == run(capsys, "inspect", whole)


def test_inspect_when_files_are_not_whole_then_it_says_so_without_reading_them(copied: Path, capsys: Output) -> None:
    first, second = read_manifest(copied).files[:2]
    (copied / first.name).unlink()
    (copied / second.name).write_bytes(b"short")
    status, lines, _ = run(capsys, "inspect", copied)
    assert status == 0
    fault = f"{first.name} is missing, {second.name} has 5 bytes, not {second.nbytes:,}"
    assert cells(lines)[-1] == ["not whole", fault]


def test_inspect_when_there_are_many_files_and_dtypes_then_files_are_summed_up(tmp_path: Path, capsys: Output) -> None:
    World.of(small_model(layers=2), dp=17).save(tmp_path)
    manifest = read_manifest(tmp_path)
    bf16 = {"exp_avg/scale": replace(manifest.tensors["exp_avg/scale"], dtype="bfloat16")}
    about = {"host": "megatron-core", "ranks": 17, "data_parallel": 17}
    groups = (replace(manifest.groups[0], step=None), manifest.groups[1])
    rewritten(tmp_path, tensors={**manifest.tensors, **bf16}, about=about, num_skipped=3, loss_scale={}, groups=groups)
    (tmp_path / manifest.files[4].name).unlink()
    lines = run(capsys, "inspect", tmp_path)[1]
    sizes = sorted(file.nbytes for file in manifest.files)
    first, last = manifest.files[0].name, manifest.files[-1].name
    shown = cells(lines)
    for row in (
        ["written by", "host megatron-core"],
        ["layout", "ranks 17, data_parallel 17"],
        ["steps", "not counted, 10; 3 more were skipped"],
        ["loss scale", "none, or one that never changes"],
        ["size", "15 params, 1,337 elements, 15.7 KiB of state"],
        ["17 files", f"{first} to {last}, {size_text(sizes[0])} to {size_text(sizes[-1])} each"],
        ["not whole", f"{manifest.files[4].name} is missing"],
    ):
        assert row in shown
    assert "of each" not in [row[0] for row in shown]
    (scale,) = [line for line in lines if " scale " in line and "[1]" in line]
    assert scale.endswith("main, exp_avg_sq in float32; exp_avg in bfloat16")


def test_inspect_when_there_are_no_groups_then_it_says_so(copied: Path, capsys: Output) -> None:
    rewritten(copied, groups=())
    status, lines, _ = run(capsys, "inspect", copied)
    assert (status, cells(lines)[cells(lines).index(["param groups"]) + 1][0]) == (0, "none")


def param(name: str, *shape: int, group: int = 0) -> Param:
    return Param(name, shape, 4 * math.prod(shape), {"main": "float32"}, group)


def test_tree_when_layers_differ_then_only_those_that_are_alike_are_one_branch() -> None:
    experts = [param(f"layers.{layer}.experts.{number}.w", 2) for layer in (1, 2, 10, 11) for number in (0, 1)]
    tree = tree_of([*experts, param("layers.9.w", 3), param("bias.0", 1), param("bias.1", 1), param("a", 1, group=1)])
    a, bias, layers, other = tree.children
    assert [str(each.label).split(" ")[0] for each in tree.children] == [
        "a",
        "bias.0-1",
        "layers.1-2,10-11:",
        "layers.9.w",
    ]
    assert (
        "group 1" in str(a.label) and "2 x [1], 1 element" in str(bias.label) and "[3], 3 elements" in str(other.label)
    )
    assert "4 alike, 64 B" in str(layers.label)
    (of_layer,) = layers.children
    assert "experts.0-1: 2 alike, 16 B" in str(of_layer.label)
    (leaf,) = of_layer.children
    assert str(leaf.label).startswith("w ") and "[2], 2 elements, 8 B" in str(leaf.label)


def test_verify_when_all_is_well_then_what_was_checked_and_status_0(whole: Path, capsys: Output) -> None:
    manifest = read_manifest(whole)
    status, lines, err = run(capsys, "verify", whole)
    checked = {row[1]: row[2] for row in cells(lines) if row[0] == "ok"}
    assert (status, err, lines[-1]) == (0, "", "no problem found: it is whole")
    assert checked.keys() == {"files", "metadata", "tensors", "values", "groups"}
    assert checked["files"].startswith(f"4 files, {size_text(manifest.nbytes)}")
    assert checked["tensors"].startswith("81 tensors of 27 params")
    assert checked["values"].startswith("7,119 values")
    assert checked["groups"].startswith("2 groups")


def problems(capsys: Output, folder: Path) -> list[list[str]]:
    """Cells of lines about problems, and the verdict; the status must be 1."""
    status, lines, err = run(capsys, "verify", folder)
    assert (status, err) == (1, "")
    return [row for row in cells(lines[2:]) if row[0] != "ok"]


def chunk_of(manifest: Manifest, key: str, at: int = 0) -> Chunk:
    return manifest.tensors[key].chunks[at]


def test_verify_when_a_byte_of_a_value_changed_then_file_and_param_are_named(copied: Path, capsys: Output) -> None:
    manifest = read_manifest(copied)
    chunk = chunk_of(manifest, f"exp_avg/{QKV}")
    file = manifest.files[chunk.file]
    data = bytearray((copied / file.name).read_bytes())
    stored = data.index(wanted_bytes(copied, f"exp_avg/{QKV}", chunk), chunk.start)
    data[stored] ^= 1
    (copied / file.name).write_bytes(data)
    found = problems(capsys, copied)
    assert found[0][:2] == ["problem", "files"]
    assert re.sub(r"CRC-32 [0-9a-f]{8},", "CRC-32 X,", found[0][2]) == (
        f"{file.name} has CRC-32 X, not {file.crc32:08x}; 1 param damaged:"
    )
    assert found[1:] == [[f"{QKV} [0:12, 0:6] of exp_avg"], ["1 problem: load an earlier checkpoint"]]


#: What happens to `.metadata`; the loader of torch refuses all of them, ours reads none.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped at the start": lambda path: _flip(path, 0.01),
    "flipped in the middle": lambda path: _flip(path, 0.5),
    "flipped at the end": lambda path: _flip(path, 0.99),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "of another checkpoint": lambda path: path.write_bytes(
        path.read_bytes().replace(b"exp_avg/scale", b"exp_avg/scalf")
    ),
}


def _flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x10
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_when_the_metadata_for_torch_is_damaged_then_it_says_so(
    damage: str, is_old: bool, copied: Path, tmp_path: Path, capsys: Output
) -> None:
    if is_old:
        rewritten(copied, metadata=None)
    DAMAGES[damage](copied / ".metadata")
    found = problems(capsys, copied)
    assert found[0][:2] == ["problem", "metadata"]
    assert found[0][2].startswith(".metadata ") and "torch alone" in found[0][2]
    assert found[-1] == [f"1 problem: megatron-distopt convert {copied} NEW --to distopt mends it"]
    assert run(capsys, "convert", copied, tmp_path / "new", "--to", "distopt")[0] == 0
    assert run(capsys, "verify", tmp_path / "new")[0] == 0


def test_verify_when_another_torch_wrote_the_metadata_then_its_content_is_compared(
    copied: Path, capsys: Output
) -> None:
    about = {**read_manifest(copied).about, "torch": "2.3.0"}
    rewritten(copied, metadata=None, about=about)
    (copied / ".metadata").write_bytes(pickletools.optimize((copied / ".metadata").read_bytes()))
    assert run(capsys, "verify", copied)[0] == 0
    inner = read_manifest(copied).tensors
    shorter = {key: replace(record, chunks=record.chunks[:1]) for key, record in inner.items()}
    rewritten(copied, metadata=None, about=about, tensors=shorter)
    outcome = document(capsys, "verify", copied)[1]
    said = [problem["text"] for problem in outcome["problems"] if problem["area"] == "metadata"]  # type: ignore[union-attr]
    assert len(said) == 1 and said[0].startswith("says something else of ")


def wanted_bytes(folder: Path, key: str, chunk: Chunk) -> bytes:
    tensor = open_checkpoint(folder).read(key)[chunk.box.as_slices()]
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def test_verify_when_bytes_between_tensors_changed_then_no_param_is_blamed(copied: Path, capsys: Output) -> None:
    file = read_manifest(copied).files[0]
    with open(copied / file.name, "ab") as damaged:
        damaged.write(b"more")
    said = f"has {file.nbytes + 4:,} bytes, not {file.nbytes:,}; no tensor in it is damaged"
    assert problems(capsys, copied)[0] == ["problem", "files", f"{file.name} {said}"]


def test_verify_when_files_are_missing_and_short_then_their_params_are_named(copied: Path, capsys: Output) -> None:
    manifest = read_manifest(copied)
    short, missing = manifest.files[0], manifest.files[2]
    (copied / missing.name).unlink()
    last = stored_in(manifest)[0][-1]
    begin, kind = last.chunk.start, kind_of(last.key)
    (copied / short.name).write_bytes((copied / short.name).read_bytes()[:begin])
    found = problems(capsys, copied)
    assert found[:2] == [
        ["problem", "files", f"{short.name} has {begin:,} bytes, not {short.nbytes:,}; 1 param damaged:"],
        [f"{name_of(last.key)} {box_text(last.chunk.box)} of {kind}"],
    ]
    start = found.index(["problem", "files", f"{missing.name} is missing; 13 params damaged:"])
    assert found[start + 1] == ["decoder.layers.0.input_layernorm.weight [0:6]"]
    assert found[start + 9 :] == [["and 5 more: --json has all"], ["2 problems: load an earlier checkpoint"]]
    status, outcome = document(capsys, "verify", copied)
    listed = outcome["problems"]
    assert (status, outcome["is_whole"], [each["subject"] for each in listed]) == (1, False, [short.name, missing.name])  # type: ignore[attr-defined]
    assert len(listed[1]["lost"]) == 13 and f"main/{EMBEDDING}" in listed[1]["keys"]  # type: ignore[index]


def test_verify_when_a_value_is_not_finite_then_its_place_in_the_whole_tensor(copied: Path, capsys: Output) -> None:
    def spoiled(key: str, tensor: Tensor) -> Tensor:
        if key == f"main/{QKV}":
            tensor[7, 2] = math.nan
        if key == "exp_avg/conv.weight":
            tensor[1:, 3, 4] = -math.inf
        return tensor

    write_checkpoint(copied, changed(open_checkpoint(copied), spoiled))
    file = read_manifest(copied).files[0].name
    conv, qkv, verdict = (row[-1] for row in problems(capsys, copied))
    assert conv.startswith(f"exp_avg/conv.weight holds -inf at [1, 3, 4], in chunk [0:3, 0:4, 0:5] in {file}; 2 of ")
    assert qkv == f"main/{QKV} holds nan at [7, 2], in chunk [0:24, 0:6] in {file}"
    assert verdict == "2 problems: load an earlier checkpoint"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_when_a_chunk_lies_somewhere_then_the_index_is_of_the_whole_tensor(value: float) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    tensor[1, 0] = value
    found = non_finite(tensor, Box((10, 20), (2, 3)))
    assert found is not None
    assert (found.index, found.count) == ((11, 20), 1)
    assert found.value == value or math.isnan(found.value) == math.isnan(value)


def test_non_finite_when_the_sum_overflows_and_no_value_does_then_none() -> None:
    assert non_finite(torch.full((4,), 3e38), Box((0,), (4,))) is None


GROUPS: list[tuple[str, Callable[[GroupRecord, GroupRecord], tuple[GroupRecord, ...]], str]] = [
    ("in none", lambda a, b: (replace(a, names=tuple(n for n in a.names if n != QKV)), b), f"{QKV} is in no group"),
    ("no tensor", lambda a, b: (a, replace(b, names=(*b.names, "x"))), "x is in group 1 and has no tensor"),
]


def test_verify_when_a_param_is_in_two_groups_then_the_manifest_is_refused(copied: Path, capsys: Output) -> None:
    first, second = read_manifest(copied).groups
    rewritten(copied, groups=(first, replace(second, names=(*second.names, QKV))))
    found = problems(capsys, copied)
    assert found[0][1] == "manifest" and f"{QKV!r}" in found[0][2] and "groups 0 and 1" in found[0][2]


@pytest.mark.parametrize(("change", "text"), [pytest.param(*row, id=name) for name, *row in GROUPS])
def test_verify_when_groups_do_not_fit_then_the_param_is_named(
    change: Callable[[GroupRecord, GroupRecord], tuple[GroupRecord, ...]], text: str, copied: Path, capsys: Output
) -> None:
    rewritten(copied, groups=change(*read_manifest(copied).groups))
    assert problems(capsys, copied)[0] == ["problem", "groups", text]


def test_verify_when_params_of_a_group_have_other_state_then_each_is_named(copied: Path, capsys: Output) -> None:
    tensors = dict(read_manifest(copied).tensors)
    del tensors[f"exp_avg_sq/{QKV}"], tensors["exp_avg/scale"], tensors["exp_avg_sq/scale"], tensors["main/conv.weight"]
    tensors["exp_avg/conv.weight"] = replace(tensors["exp_avg/conv.weight"], shape=(5, 4, 5))
    rewritten(copied, tensors=tensors)
    usual = "exp_avg in float32, exp_avg_sq in float32"
    assert [row[-1] for row in problems(capsys, copied)] == [
        "exp_avg/conv.weight is not complete: 60 of 100 elements were saved",
        "conv.weight has exp_avg, exp_avg_sq and no main",
        f"{QKV} has exp_avg in float32 as its state, where others of group 0 have {usual}",
        f"scale has nothing as its state, where others of group 1 have {usual}",
        "4 problems: load an earlier checkpoint",
    ]


CHUNKS: list[tuple[str, tuple[int, ...], list[Box], list[str]]] = [
    ("whole", (4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))], []),
    ("a scalar", (), [Box((), ())], []),
    ("a gap", (4, 6), [Box((0, 0), (4, 3)), Box((1, 3), (3, 3))], ["is not complete: 21 of 24 elements were saved"]),
    ("none", (2,), [], ["is not complete: 0 of 2 elements were saved"]),
]


@pytest.mark.parametrize(("shape", "boxes", "texts"), [pytest.param(*row, id=name) for name, *row in CHUNKS])
def test_check_when_chunks_leave_elements_out_then_it_says_how_many(
    shape: tuple[int, ...], boxes: list[Box], texts: list[str]
) -> None:
    record = TensorRecord(shape, "float32", tuple(Chunk(box, 0, 0, 1) for box in boxes))
    manifest = Manifest("x", (FileRecord("F", 1, 0),), {"main/w": record}, (), "")
    assert [(each.subject, each.text) for each in check_chunks(manifest)] == [("main/w", text) for text in texts]


def test_verify_when_elements_are_there_twice_then_the_manifest_is_refused(copied: Path, capsys: Output) -> None:
    tensors = dict(read_manifest(copied).tensors)
    record = tensors[f"main/{QKV}"]
    tensors[f"main/{QKV}"] = replace(record, chunks=(*record.chunks, record.chunks[0]))
    rewritten(copied, tensors=tensors)
    found = problems(capsys, copied)
    assert found[0][1] == "manifest" and f"main/{QKV} overlap" in found[0][2]


def test_verify_when_the_manifest_is_damaged_then_that_is_the_problem(copied: Path, capsys: Output) -> None:
    (copied / MANIFEST).write_text("{}", encoding="utf-8")
    ((status, area, text), verdict) = problems(capsys, copied)
    assert (status, area, verdict) == ("problem", "manifest", ["1 problem: load an earlier checkpoint"])
    assert f"Invalid manifest {copied / MANIFEST}: KeyError('format')" in text
    assert text.endswith(" Load an earlier checkpoint; this one was damaged after it was written.")


def test_verify_when_there_are_many_problems_then_the_rest_is_counted(copied: Path, capsys: Output) -> None:
    rewritten(copied, groups=())
    found = problems(capsys, copied)
    assert len(found) == 22
    assert found[20:] == [
        ["problem", "groups", "and 7 more: --json has all"],
        ["27 problems: load an earlier checkpoint"],
    ]
    outcome = document(capsys, "verify", copied)[1]
    assert len(outcome["problems"]) == 27  # type: ignore[arg-type]


def test_diff_when_written_at_other_sizes_then_equal_to_the_bit(whole: Path, tmp_path: Path, capsys: Output) -> None:
    World.of(small_model(), dp=3, pp=2).save(tmp_path)
    status, lines, err = run(capsys, "diff", whole, tmp_path)
    assert (status, err) == (0, "")
    assert cells(lines)[1:] == [
        ["A", str(whole)],
        ["B", str(tmp_path)],
        ["equal to the bit: 27 params, 81 tensors and all settings"],
    ]


def test_diff_when_everything_differs_then_largest_first_and_status_1(
    saved: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    def different(key: str, tensor: Tensor) -> Tensor:
        if key == f"main/{QKV}":
            tensor[0, 0] += 0.5
            tensor[23, 5] -= 2.0
        if key == "main/conv.weight":
            tensor[0, 0, :3] = -16.0
        if key == "exp_avg/scale":
            tensor[0] = math.nan
        return tensor

    World.of(small_model(), tp=4, step=11, lr=5e-4).save(tmp_path)
    source = changed(open_checkpoint(tmp_path), different)
    head = replace(source.head, num_skipped=1, loss_scale={"scale": 512.0, "good_steps": 0, "tolerated": 2})
    renamed = {key.replace("scale", "other") if key == "exp_avg_sq/scale" else key: key for key in source.tensors}
    infos = {key: source.tensors[old] for key, old in renamed.items()}
    write_checkpoint(tmp_path, Source(head, infos, lambda key, box: source.read_box(renamed[key], box)))
    status, lines, err = run(capsys, "diff", saved, tmp_path)
    conv, qkv = (open_checkpoint(whole).read(f"main/{name}") for name in ("conv.weight", QKV))
    apart = conv[0, 0, 2].item() + 16
    assert (status, err) == (1, "")
    shown = cells(lines)
    for row in (
        ["A", f"{whole}, the latest in {saved}"],
        ["B", str(tmp_path)],
        ["step", "10", "11", "27 params"],
        ["lr", "0.001", "0.0005", "27 params"],
        ["loss scale: scale", "1024", "512", "the whole checkpoint"],
        ["skipped steps", "0", "1", "the whole checkpoint"],
        ["A", "scale (exp_avg_sq)"],
        ["B", "other (exp_avg_sq)"],
        [EMBEDDING, "[40, 6] and [48, 6]: rows 0 to 39 compared"],
        ["main: 2 of 27 tensors differ"],
        ["exp_avg: 1 of 27 tensors differ"],
        ["scale", "nan", "nan", "1 of 1"],
        ["exp_avg_sq: equal to the bit"],
    ):
        assert row in shown
    largest, second = (
        ["conv.weight", f"{apart:.3g}", f"{apart / conv.max().item():.2g}", "3 of 60"],
        [QKV, "2", f"{2 / qkv.max().item():.2g}", "2 of 144"],
    )
    assert shown.index(largest) < shown.index(second)
    assert lines[-1] == (
        "different: values of 3 tensors, shapes or dtypes of 3 tensors, tensors in one alone of 2 params, 4 settings"
    )
    found = document(capsys, "diff", saved, tmp_path)[1]
    first = found["tensors"][0]  # type: ignore[index]
    assert (first["key"], first["largest"], found["is_equal"]) == ("exp_avg/scale", "nan", False)


def test_diff_when_hosts_name_params_differently_then_they_are_the_same(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
    source = open_checkpoint(whole)

    def theirs(name: str) -> str:
        for ours, other in (("embedding.", "language_model.embedding."), ("decoder.", "language_model.encoder.")):
            name = name.replace(ours, other) if name.split("/")[-1].startswith(ours) else name
        return name.replace("linear_fc1", "dense_h_to_4h")

    renamed = {theirs(key): key for key in source.tensors}
    groups = tuple(replace(group, names=tuple(map(theirs, group.names))) for group in source.head.groups)
    infos = {key: source.tensors[old] for key, old in renamed.items()}
    other = Source(replace(source.head, groups=groups), infos, lambda key, box: source.read_box(renamed[key], box))
    write_checkpoint(tmp_path, other)
    assert f"main/language_model.{EMBEDDING}" in read_manifest(tmp_path).tensors
    assert run(capsys, "diff", whole, tmp_path)[0] == 0


def test_diff_when_shapes_and_dtypes_do_not_fit_then_not_compared(whole: Path, tmp_path: Path, capsys: Output) -> None:
    source = open_checkpoint(whole)

    def other(key: str, tensor: Tensor) -> Tensor:
        return tensor.t() if key == f"main/{QKV}" else tensor.bfloat16() if key.startswith("exp_avg/") else tensor

    write_checkpoint(tmp_path, changed(source, other))
    status, lines, _ = run(capsys, "diff", whole, tmp_path)
    assert status == 1
    assert ["27 params (exp_avg)", "float32 and bfloat16"] in cells(lines)
    assert [f"{QKV} (main)", "[24, 6] and [6, 24]: not compared"] in cells(lines)


def test_compare_when_bits_differ_and_values_do_not_then_it_counts_them() -> None:
    found = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.count, found.largest, found.relative) == (1, 0.0, 0.0)
    nan = torch.tensor([math.nan])
    assert compare(nan, nan.clone()).count == 0
    assert compare(torch.tensor([1.5]), torch.tensor([1.5], dtype=torch.bfloat16)).count == 0
    assert compare(torch.zeros(1), torch.ones(1)).relative == math.inf


def test_diff_when_one_cannot_be_read_then_status_2(whole: Path, tmp_path: Path, capsys: Output) -> None:
    status, lines, err = run(capsys, "diff", whole, tmp_path / "none")
    assert (status, lines) == (2, [])
    assert err.startswith(f"megatron-distopt: Invalid checkpoint {tmp_path / 'none'}: no such file or folder. ")


def test_convert_when_to_torch_then_any_command_takes_it_and_nothing_differs(
    saved: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    target = tmp_path / "state.pt"
    status, lines, err = run(capsys, "convert", saved, target, "--to", "torch")
    assert (status, err) == (0, "")
    assert cells(lines)[1:] == [
        ["from", f"{whole} (distopt)"],
        ["which", f"the latest in {saved}"],
        ["to", f"{target} (torch)"],
        ["next", f"torch.load({str(target)!r}, weights_only=True)"],
    ]
    assert torch.load(target, weights_only=True)["groups"][0]["step"] == 10
    assert run(capsys, "diff", whole, target)[0] == 0
    assert run(capsys, "inspect", target)[1][3:8] == run(capsys, "inspect", whole)[1][3:8]
    status, lines, _ = run(capsys, "verify", target)
    assert (status, lines[-1]) == (0, "no problem found: it is whole")
    assert [row[1] for row in cells(lines) if row[0] == "ok"] == ["tensors", "values", "groups"]


def test_convert_when_json_then_what_was_done(whole: Path, tmp_path: Path, capsys: Output) -> None:
    assert document(capsys, "convert", whole, tmp_path / "new", "--to", "distopt", "--resume-step", "10") == (
        0,
        {
            "source": str(whole),
            "chosen": "",
            "found": "distopt",
            "target": str(tmp_path / "new"),
            "written": "distopt",
            "is_iteration": False,
        },
    )
    assert run(capsys, "diff", whole, tmp_path / "new")[0] == 0


def test_convert_when_it_needs_model_files_then_refused_and_nothing_written(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
    status, lines, err = run(capsys, "convert", whole, tmp_path / "new", "--to", "gathered", "--dp", "4")
    assert (status, lines, list(tmp_path.iterdir())) == (1, [], [])
    assert err.startswith(f"megatron-distopt: Invalid checkpoint {whole}: no model files for gathered. ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--to", "per_rank"], "Invalid format: 'per_rank'. Must be one of {all}. Write --to per-rank."),
        (["--to", "Torch"], "Invalid format: 'Torch'. Must be one of {all}. Write --to torch."),
        (
            ["--to", "x"],
            "Invalid format: 'x'. Must be one of {all}. Write --to distopt for the format of this package.",
        ),
        (
            ["--to", "torch", "--dp", "0"],
            "Invalid number: '0'. Must be a whole number of at least 1. Write one such as 8.",
        ),
    ],
)
def test_convert_when_an_option_is_bad_then_what_to_write(words: list[str], text: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", "a", "b", *words])
    assert stop.value.code == 2
    error = f"convert: error: argument {words[-2]}: {text.format(all=', '.join(FORMATS))}\n"
    assert capsys.readouterr().err.endswith(error)


def test_convert_when_its_formats_are_listed_then_they_are_those_that_can_be_written() -> None:
    assert FORMATS == TARGETS


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_commands_when_the_path_is_wrong_then_one_line_that_helps(
    command: str, saved: Path, whole: Path, tmp_path: Path, capsys: Output
) -> None:
    data = whole / read_manifest(whole).files[0].name
    write = "Write the path of one of these."
    for path, text in (
        (tmp_path / "none", f"{tmp_path / 'none'}: no such file or folder. {RULE} {write}"),
        (
            saved / "iter_000100",
            f"{saved / 'iter_000100'}: no such file or folder. {RULE} Write {saved / ITERATION}, which is there.",
        ),
        (data, f"{data}: one file of a checkpoint. {RULE} Write the folder: {whole}."),
    ):
        assert run(capsys, command, path) == (1, [], f"megatron-distopt: Invalid checkpoint {text}\n")


def test_inspect_when_there_is_nothing_of_a_checkpoint_then_refused(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "notes.txt").write_text("none", encoding="utf-8")
    for path in (tmp_path, tmp_path / "notes.txt"):
        status, lines, err = run(capsys, "inspect", path)
        assert (status, lines) == (1, [])
        assert err.startswith("megatron-distopt: Invalid ") and str(path) in err


@pytest.mark.parametrize("text", ["300", "../x", ""])
def test_inspect_when_the_latest_iteration_is_not_there_then_another_is_offered(
    text: str, saved: Path, tmp_path: Path, capsys: Output
) -> None:
    for number in (100, 200):
        (tmp_path / f"iter_{number:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    got = f"latest_checkpointed_iteration.txt says {text!r}, and there is no such iteration"
    remedy = f"Write an iteration: {tmp_path / 'iter_0000200'}."
    refused = f"megatron-distopt: Invalid checkpoint {tmp_path}: {got}. {RULE} {remedy}\n"
    assert run(capsys, "inspect", tmp_path) == (1, [], refused)


def test_inspect_when_a_save_was_not_finished_then_what_to_do(saved: Path, tmp_path: Path, capsys: Output) -> None:
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(saved / ITERATION, tmp_path / "run" / "iter_0000200")
    unfinished = tmp_path / "run" / "iter_0000200" / "distrib_optim.distopt"
    (unfinished / MANIFEST).unlink()
    (unfinished / ".metadata").unlink()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("200", encoding="utf-8")
    got = "a save that was not finished: 4 .distcp files and no manifest.json. Must hold manifest.json"
    for earlier in (tmp_path / "run" / ITERATION, "an earlier one"):
        remedy = f"Wait if a run is saving there now; if that run has died, take {earlier}"
        refused = f"megatron-distopt: Invalid checkpoint {unfinished}: {got}. {remedy}.\n"
        assert run(capsys, "inspect", tmp_path / "run") == (1, [], refused)
        shutil.rmtree(tmp_path / "run" / ITERATION, ignore_errors=True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_when_on_a_terminal_then_a_bar_that_disappears_and_else_nothing(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    made = partial(Console, file=stream, force_terminal=is_terminal, width=80, color_system=None)
    monkeypatch.setattr(show, "Console", lambda stderr: made())
    with progress_of("verifying", 8 << 30) as progress:
        for _ in range(8):
            progress(1 << 30)
    drawn = stream.getvalue()
    if is_terminal:
        assert "verifying" in drawn and "8.0/8.0 GiB" in drawn
        assert drawn.endswith("\x1b[2K")  # the line is erased
    else:
        assert drawn == ""


def test_commands_when_interrupted_then_a_line_and_the_status_of_a_shell(
    whole: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_command, "convert", interrupted)
    words = ("convert", whole, tmp_path / "new", "--to", "torch")
    assert run(capsys, *words) == (130, [], "megatron-distopt: interrupted\n")


def test_commands_when_the_reader_of_their_output_has_gone_then_no_traceback(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert cli.main(["inspect", str(whole)]) == 1
