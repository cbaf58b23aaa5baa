"""`diff`: in what two checkpoints differ, and with which status it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_distopt.checkpoint import read_manifest
from megatron_distopt.checkpoint.source import Source, open_checkpoint, write_checkpoint
from megatron_distopt.cli.diff import compare
from tests.support.checkpoint_commands import EMBEDDING, QKV, Output, cells, changed, document, run
from tests.support.simulated import World, small_model


def test_diff_when_written_at_other_sizes_then_equal_to_the_bit(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
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
    head = replace(
        source.head, num_skipped=1, loss_scale={"scale": 512.0, "good_steps": 0, "tolerated": 2}
    )
    renamed = {
        key.replace("scale", "other") if key == "exp_avg_sq/scale" else key: key
        for key in source.tensors
    }
    infos = {key: source.tensors[old] for key, old in renamed.items()}
    write_checkpoint(
        tmp_path, Source(head, infos, lambda key, box: source.read_box(renamed[key], box))
    )
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
        ["loss scale: scale", "1024.0", "512.0", "the whole checkpoint"],
        ["skipped steps", "0", "1", "the whole checkpoint"],
        ["scale (exp_avg_sq)", "only in A"],
        ["other (exp_avg_sq)", "only in B"],
        [f"{EMBEDDING} (main, exp_avg, exp_avg_sq)", "[40, 6] and [48, 6]: rows 0 to 39 compared"],
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
    assert lines[-1] == "different"
    found = document(capsys, "diff", saved, tmp_path)[1]
    first = found["tensors"][0]  # type: ignore[index]
    assert (first["key"], first["largest"], found["is_equal"]) == ("exp_avg/scale", "nan", False)


def test_diff_when_hosts_name_params_differently_then_they_are_the_same(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
    source = open_checkpoint(whole)

    def theirs(name: str) -> str:
        for ours, other in (
            ("embedding.", "language_model.embedding."),
            ("decoder.", "language_model.encoder."),
        ):
            name = name.replace(ours, other) if name.split("/")[-1].startswith(ours) else name
        return name.replace("linear_fc1", "dense_h_to_4h")

    renamed = {theirs(key): key for key in source.tensors}
    groups = tuple(
        replace(group, names=tuple(map(theirs, group.names))) for group in source.head.groups
    )
    infos = {key: source.tensors[old] for key, old in renamed.items()}
    other = Source(
        replace(source.head, groups=groups),
        infos,
        lambda key, box: source.read_box(renamed[key], box),
    )
    write_checkpoint(tmp_path, other)
    assert f"main/language_model.{EMBEDDING}" in read_manifest(tmp_path).tensors
    assert run(capsys, "diff", whole, tmp_path)[0] == 0


def test_diff_when_shapes_and_dtypes_do_not_fit_then_not_compared(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
    source = open_checkpoint(whole)

    def other(key: str, tensor: Tensor) -> Tensor:
        return (
            tensor.t()
            if key == f"main/{QKV}"
            else tensor.bfloat16()
            if key.startswith("exp_avg/")
            else tensor
        )

    write_checkpoint(tmp_path, changed(source, other))
    status, lines, _ = run(capsys, "diff", whole, tmp_path)
    assert status == 1
    assert any(
        row[0].endswith(" and 19 more") and row[-1] == "float32 and bfloat16"
        for row in cells(lines)
    )
    assert [f"{QKV} (main)", "[24, 6] and [6, 24]: not compared"] in cells(lines)


def test_compare_when_bits_differ_and_values_do_not_then_it_counts_them() -> None:
    found = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.count, found.largest, found.relative) == (1, 0.0, 0.0)
    nan = torch.tensor([math.nan])
    assert compare(nan, nan.clone()).count == 0
    assert compare(torch.tensor([1.5]), torch.tensor([1.5], dtype=torch.bfloat16)).count == 0
    assert compare(torch.zeros(1), torch.ones(1)).relative == math.inf


def test_diff_when_one_cannot_be_read_then_status_2(
    whole: Path, tmp_path: Path, capsys: Output
) -> None:
    status, lines, err = run(capsys, "diff", whole, tmp_path / "none")
    assert (status, lines) == (2, [])
    assert err.startswith("megatron-distopt: ") and str(tmp_path / "none") in err
