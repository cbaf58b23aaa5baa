"""Small checkpoints of other software, made by hand: layouts of older versions, damage, and files
with code in them."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.manifest import Chunk, Manifest, TensorRecord
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.tensor_file import TensorWriter
from megatron_distopt.checkpoint.torch_metadata import metadata_of
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import convert, deepspeed_universal, open_any
from megatron_distopt.formats.megatron_core import nameless, torch_dist
from megatron_distopt.formats.pickles import Inert, attribute, load_file, load_metadata, save_whole
from megatron_distopt.formats.torch_files import open_dcp
from megatron_distopt.layout import Box
from tests.support.fork_files import Trap
from tests.support.refusals import assert_mentions, assert_says, refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)

KINDS = ("fp32_param", "exp_avg", "exp_avg_sq")
#: Two layers of a gated model: shapes of whole params.
SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    **{
        f"decoder.layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "input_layernorm.weight": (4,),
            "mlp.linear_fc1.weight": (12, 4),
        }.items()
    },
    "decoder.final_layernorm.weight": (4,),
}
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "lr_mult": 1.0, "is_expert_parallel": False}
GROUPS = [
    {**OPTIONS, "wd_mult": mult, "weight_decay": 0.1 * mult, "step": 7, "params": []}
    for mult in (1.0, 0.0)
]
SCALER = {"scale": torch.tensor([512.0]), "growth_tracker": 5, "hysteresis_tracker": 2}


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_state() -> dict[str, Tensor]:
    """By key of a `Source`."""
    return {
        f"{'main' if kind == 'fp32_param' else kind}/{name}": numbers(
            shape, 100 * kind_number + number
        )
        for kind_number, kind in enumerate(KINDS)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def model_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[5:]: tensor.bfloat16() for key, tensor in state.items() if key.startswith("main/")}


def by_kind(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By megatron-core's kind and name."""
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for key, tensor in state.items():
        kind, name = key.split("/")
        found["fp32_param" if kind == "main" else kind][name] = tensor
    return found


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the layers of a param in one tensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            found[f"decoder.layers.{rest}"] = torch.stack(
                [tensor, tensors[f"decoder.layers.1.{rest}"]]
            )
        elif not name.startswith("decoder.layers."):
            found[name] = tensor
    return found


def save_dcp(folder: Path, tensors: dict[str, Tensor], common: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(tensors, checkpoint_id=folder)
    torch.save(common, folder / "common.pt")
    return folder


def common(**more: Any) -> dict[str, Any]:
    args = argparse.Namespace(tensor_model_parallel_size=1, params_dtype=torch.bfloat16)
    return {
        "args": args,
        "iteration": 7,
        "optimizer": {"optimizer": {"param_groups": GROUPS}, **more},
    }


def save_by_param(
    folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
) -> Path:
    state = whole_state()
    tensors = change(model_of(state))
    for kind, of_kind in by_kind(state).items():
        tensors |= {
            f"optimizer.state.{kind}.{name}": tensor for name, tensor in change(of_kind).items()
        }
    return save_dcp(folder, tensors, common(grad_scaler=SCALER))


def check(source: Source, state: dict[str, Tensor]) -> None:
    assert source.tensors.keys() == state.keys()
    assert [key for key in state if not torch.equal(source.read(key), state[key])] == []


# What megatron-core 0.9 to 0.14 saved ("fully_sharded_model_space") was compared with its own, by
# hand; it cannot be written by the version that the other tests use.


def test_open_when_state_lies_param_by_param_then_all_of_it_is_read(tmp_path: Path) -> None:
    source = torch_dist.open_torch_dist(save_by_param(tmp_path / "checkpoint"))
    check(source, whole_state())
    assert source.head.loss_scale == {"scale": 512.0, "good_steps": 5.0, "tolerated": 2.0}
    assert {group.step for group in source.head.groups} == {7}
    assert [group.options["weight_decay"] for group in source.head.groups] == [0.1, 0.0]
    assert [len(group.names) for group in source.head.groups] == [3, 3]
    assert source.head.about == {
        "host": "megatron-core",
        "format": "torch_dist, by param",
        "iteration": 7,
    }


def halves_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gate, up = tensor.chunk(2) if "fc1" in name else (tensor, tensor)
        found |= (
            {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}
            if "fc1" in name
            else {name: tensor}
        )
    return found


def test_open_when_gates_lie_apart_then_each_is_one_param_again(tmp_path: Path) -> None:
    check(
        torch_dist.open_torch_dist(save_by_param(tmp_path / "checkpoint", halves_apart)),
        whole_state(),
    )


def grid(tensor: Tensor, parts: int) -> Tensor:
    """[parts, 1 ..., elements of a part]: rows cut into parts, each flat."""
    return tensor.reshape(parts, *(1 for _ in tensor.shape[1:]), -1).clone()


def save_flat_parts(folder: Path) -> Path:
    """As megatron-core 0.9 to 0.14 with two tensor-parallel ranks; one more dimension for stacked
    layers."""
    state = whole_state()
    tensors = stacked(model_of(state))
    for kind, of_kind in by_kind(state).items():
        for name, tensor in stacked(of_kind).items():
            parts = 4 if "fc1" in name else 2 if "embedding" in name else 1
            each = (
                torch.stack([grid(row, parts) for row in tensor])
                if "layers." in name
                else grid(tensor, parts)
            )
            tensors[f"optimizer.state.{kind}.{name}"] = each
    return save_row_by_row(folder, tensors, common())


def save_row_by_row(folder: Path, tensors: dict[str, Tensor], common: dict[str, Any]) -> Path:
    """As ranks do of which each has some of the layers, or some of the rows."""
    folder.mkdir(parents=True)
    records: dict[str, TensorRecord] = {}
    with disk.written(folder / "__0_0.distcp") as file:
        writer = TensorWriter(folder / "__0_0.distcp", file)
        for key, tensor in tensors.items():
            chunks = []
            for number, row in enumerate(tensor):
                stretch = writer.append(key, row[None])
                box = Box((number, *(0 for _ in row.shape)), (1, *row.shape))
                chunks.append(Chunk(box, 0, stretch.start, stretch.nbytes))
            records[key] = TensorRecord(
                tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(chunks)
            )
    manifest = replace(writer.part(Manifest("", (), {}, (), ""), "0"), tensors=records)
    (folder / ".metadata").write_bytes(metadata_of(manifest))
    torch.save(common, folder / "common.pt")
    return folder


def test_open_when_parts_are_flat_then_they_have_their_shape_again(tmp_path: Path) -> None:
    check(torch_dist.open_torch_dist(save_flat_parts(tmp_path / "checkpoint")), whole_state())


def save_distrib_optim(folder: Path) -> Path:
    flat = {
        kind: numbers((160,), number)
        for number, kind in enumerate(("param", "exp_avg", "exp_avg_sq"))
    }
    rank = folder / "mp_rank_00"
    rank.mkdir(parents=True)
    buffers = {
        "buckets_coalesced": True,
        0: {(torch.bfloat16, torch.float32): {**flat, "numel_unpadded": 160}},
    }
    torch.save(buffers, rank / "distrib_optim.pt")
    optimizer = {"optimizer": {"param_groups": GROUPS}, "grad_scaler": SCALER}
    content = {
        "args": argparse.Namespace(),
        "iteration": 7,
        "model": model_of(whole_state()),
        "optimizer": optimizer,
    }
    torch.save(content, rank / "model_optim_rng.pt")
    return folder


def save_zero(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"optimizer_state_dict": {}}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def save_in_buckets(folder: Path) -> Path:
    place = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, "
        "torch.float32).bucket_idx_0"
    )
    return save_dcp(
        folder, {**model_of(whole_state()), f"{place}.param": numbers((160,), 0)}, common()
    )


@pytest.mark.parametrize(
    ("save", "remedy"),
    [
        (save_distrib_optim, "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"),
        (save_in_buckets, "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"),
        (save_zero, "python -m deepspeed.checkpoint.ds_to_universal --input_folder "),
    ],
)
def test_convert_when_files_do_not_name_params_then_it_says_which_tool_writes_names(
    tmp_path: Path, save: Callable[[Path], Path], remedy: str
) -> None:
    folder = save(tmp_path / "iter")
    for call in (lambda: open_any(folder), lambda: convert(folder, tmp_path / "new", "distopt")):
        assert_mentions(refused(CheckpointError, call), str(folder), remedy)
    assert not (tmp_path / "new").exists()
    assert nameless.is_nameless(folder) == (save is not save_zero)


def save_universal(folder: Path) -> Path:
    for key, tensor in whole_state().items():
        kind, name = key.split("/")
        place = folder / "zero" / name
        place.mkdir(parents=True, exist_ok=True)
        # Of ZeRO stage 3 a tensor is flat, and not in a dict.
        content = tensor.reshape(-1) if kind == "exp_avg" else {"param": tensor, "cat_dim": 0}
        torch.save(content, place / f"{'fp32' if kind == 'main' else kind}.pt")
        torch.save(torch.tensor(7.0), place / "step.pt")
    torch.save(
        {"param_groups": [{"lr": 1e-3, "params": [0]}]}, folder / "zero" / "optimizer_state.pt"
    )
    model = {"param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}]}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def test_open_when_a_universal_tensor_is_flat_then_it_has_its_shape_again(tmp_path: Path) -> None:
    check(
        deepspeed_universal.open_deepspeed_universal(save_universal(tmp_path / "universal")),
        whole_state(),
    )


#: Of every format: how to make it, its reader, and its files.
FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Source], tuple[str, ...]]] = {
    "torch_dist": (
        save_by_param,
        torch_dist.open_torch_dist,
        (".metadata", "common.pt", "__0_0.distcp"),
    ),
    "deepspeed_universal": (
        save_universal,
        deepspeed_universal.open_deepspeed_universal,
        (
            *(f"zero/embedding.word_embeddings.weight/{name}.pt" for name in ("fp32", "step")),
            "zero/optimizer_state.pt",
            "mp_rank_00_model_states.pt",
        ),
    ),
}
FILES = [(name, file) for name, (_, _, files) in FORMATS.items() for file in files]


def read_all(name: str, folder: Path) -> None:
    source = FORMATS[name][1](folder)
    for key in source.tensors:
        source.read(key)


def contents(evil: Trap, old: bytes) -> dict[str, bytes]:
    """What a file may be replaced with: a pickle, what torch saves, and the same nested in what is
    expected."""
    found = {"pickle": pickle.dumps(evil), "old pickle": pickle.dumps(evil, protocol=0)}
    for how, value in {
        "torch": evil,
        "nested": {"optimizer": [torch.zeros(3), {"state": evil}]},
    }.items():
        file = io.BytesIO()
        torch.save(value, file)
        found[how] = file.getvalue().ljust(len(old), b"\0") if how == "torch" else file.getvalue()
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=False)
        found[f"{how}, old format"] = file.getvalue()
    return found


@pytest.mark.parametrize(("name", "file"), FILES)
def test_open_when_a_file_would_execute_code_then_it_does_not(
    tmp_path: Path, name: str, file: str
) -> None:
    marker = tmp_path / "executed"
    evil = Trap(f"touch '{marker}'", os.system)
    pickle.loads(pickle.dumps(evil))
    assert marker.exists(), "the trap does not work"
    marker.unlink()
    folder = FORMATS[name][0](tmp_path / "checkpoint")
    read_all(name, folder)
    for how, content in contents(evil, (folder / file).read_bytes()).items():
        (folder / file).write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            read_all(name, folder)
        assert not marker.exists(), how
        assert file.split("/")[-1] in str(error.value) or str(folder) in str(error.value), how
        assert "weights_only" not in str(error.value), how


@pytest.mark.parametrize(("name", "file"), FILES)
def test_open_when_a_file_is_cut_off_then_it_is_refused(
    tmp_path: Path, name: str, file: str
) -> None:
    folder = FORMATS[name][0](tmp_path / "checkpoint")
    whole = (folder / file).read_bytes()
    for numel in (0, len(whole) // 2, len(whole) - 1):
        (folder / file).write_bytes(whole[:numel])
        with pytest.raises(CheckpointError):
            read_all(name, folder)


@pytest.mark.parametrize(
    ("name", "file"), [each for each in FILES if not each[1].startswith((".meta", "__0"))]
)
def test_open_when_a_file_holds_something_else_then_it_is_refused(
    tmp_path: Path, name: str, file: str
) -> None:
    folder = FORMATS[name][0](tmp_path / "checkpoint")
    for content in ([], {"optimizer_state_dict": {}, "model": {}}, {"optimizer": 3}):
        torch.save(content, folder / file)
        with pytest.raises(CheckpointError):
            read_all(name, folder)


def test_metadata_when_it_names_a_file_elsewhere_then_it_is_refused(tmp_path: Path) -> None:
    folder = save_by_param(tmp_path / "checkpoint")
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../passwd"))
    assert_says(
        refused(CheckpointError, lambda: open_dcp(folder)),
        f"{path}: ValueError('../../passwd' is not a file name). Load an earlier checkpoint.",
    )


def test_file_when_it_names_what_is_unknown_then_the_user_may_allow_it(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"path": tmp_path, "what": pytest.ExitCode.OK}, path)
    assert_says(
        refused(CheckpointError, lambda: load_file(path)),
        f"{path}: it names pytest.ExitCode. If you trust it, convert it in Python after "
        "torch.serialization.add_safe_globals([pytest.ExitCode]).",
    )


def test_file_when_it_holds_objects_of_megatron_then_they_are_inert(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    module = ModuleType("megatron.core")
    module.Something = type("Something", (), {"__module__": "megatron.core"})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron", module)
        patch.setitem(sys.modules, "megatron.core", module)
        what = module.Something()
        torch.save(
            {"args": argparse.Namespace(bf16=True), "what": what, "w": torch.arange(3)}, path
        )
    found = load_file(path)
    assert isinstance(found["what"], Inert) and attribute(found["args"], "bf16") is True
    assert torch.equal(found["w"], torch.arange(3))
    assert isinstance(load_file(io.BytesIO(path.read_bytes()), "bytes")["what"], Inert)
    with pytest.raises(
        CheckpointError,
        match=r"megatron\.core\.Something was not read, so it cannot be written again",
    ):
        save_whole(found, tmp_path / "again.pt")
    assert not (tmp_path / "again.pt").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda tensors: {
                key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer")
            },
            "no optimizer state. Save it without --no-save-optim.",
        ),
        (
            lambda tensors: {"optimizer.distopt.main.w": torch.zeros(2), "w": torch.zeros(2)},
            "optimizer state 'optimizer.distopt' in an unknown form.",
        ),
        (
            lambda tensors: {
                key: tensor for key, tensor in tensors.items() if "fp32_param" not in key
            },
            "no fp32 values of 'decoder.final_layernorm.weight'.",
        ),
    ],
)
def test_open_when_the_state_is_not_there_then_it_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], text: str
) -> None:
    state = whole_state()
    tensors = model_of(state)
    for kind, of_kind in by_kind(state).items():
        tensors |= {f"optimizer.state.{kind}.{name}": tensor for name, tensor in of_kind.items()}
    folder = save_dcp(tmp_path / "checkpoint", change(tensors), common())
    assert_says(
        refused(CheckpointError, lambda: torch_dist.open_torch_dist(folder)), f"{folder}: {text}"
    )


def test_open_when_groups_are_of_no_known_rule_then_what_they_share_is_kept(tmp_path: Path) -> None:
    groups = [{**GROUPS[0], "lr_mult": mult} for mult in (1.0, 0.1, 0.01)]
    state = whole_state()
    tensors = {
        f"optimizer.state.fp32_param.{key[5:]}": tensor
        for key, tensor in state.items()
        if key[:5] == "main/"
    }
    folder = save_dcp(
        tmp_path / "checkpoint", tensors, {"optimizer": {"optimizer": {"param_groups": groups}}}
    )
    (group,) = torch_dist.open_torch_dist(folder).head.groups
    assert set(group.names) == set(SHAPES) and group.step == 7
    assert "lr_mult" not in group.options and group.options["weight_decay"] == 0.1


def test_open_when_groups_have_other_steps_then_it_is_refused(tmp_path: Path) -> None:
    groups = [{**group, "step": 7 + number} for number, group in enumerate(GROUPS)]
    tensors = {
        f"optimizer.state.fp32_param.{name}": torch.zeros(shape) for name, shape in SHAPES.items()
    }
    folder = save_dcp(
        tmp_path / "checkpoint", tensors, {"optimizer": {"optimizer": {"param_groups": groups}}}
    )
    assert_says(
        refused(CheckpointError, lambda: torch_dist.open_torch_dist(folder)), f"{folder}: 7, 8."
    )


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_metadata_when_another_python_wrote_a_path_into_it_then_it_is_read(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{module}\nPosixPath\n(V/a\ntR.".encode())
    assert load_metadata(tmp_path / ".metadata").arguments == ("/a",)
