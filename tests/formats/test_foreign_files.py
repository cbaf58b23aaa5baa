"""Small checkpoints of other software, made by hand: layouts of older versions, damage, and files with code in them."""

from __future__ import annotations

import argparse
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_distopt.checkpoint import disk
from megatron_distopt.checkpoint.dcp import metadata_of
from megatron_distopt.checkpoint.manifest import Chunk, Manifest, TensorRecord
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.tensor_file import TensorWriter
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.deepspeed import universal, zero
from megatron_distopt.formats.megatron_core import distrib_optim, torch_dist
from megatron_distopt.formats.pickles import Inert, load_bytes, load_file
from megatron_distopt.formats.torch.dcp_reader import open_dcp
from megatron_distopt.layout import Box
from tests.support.refusals import assert_says

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

KINDS = ("fp32_param", "exp_avg", "exp_avg_sq")
#: Two layers of a gated model: shapes of whole params.
SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    **{
        f"decoder.layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in {"input_layernorm.weight": (4,), "mlp.linear_fc1.weight": (12, 4)}.items()
    },
    "decoder.final_layernorm.weight": (4,),
}
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "lr_mult": 1.0, "is_expert_parallel": False}
GROUPS = [{**OPTIONS, "wd_mult": mult, "weight_decay": 0.1 * mult, "step": 7, "params": []} for mult in (1.0, 0.0)]
SCALER = {"scale": torch.tensor([512.0]), "growth_tracker": 5, "hysteresis_tracker": 2}


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_state() -> dict[str, Tensor]:
    """By key of a `Source`."""
    return {
        f"{'main' if kind == 'fp32_param' else kind}/{name}": numbers(shape, 100 * kind_number + number)
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
            found[f"decoder.layers.{rest}"] = torch.stack([tensor, tensors[f"decoder.layers.1.{rest}"]])
        elif not name.startswith("decoder.layers."):
            found[name] = tensor
    return found


def save_dcp(folder: Path, tensors: dict[str, Tensor], common: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    torch.save(common, folder / "common.pt")
    return folder


def common(**more: Any) -> dict[str, Any]:
    args = argparse.Namespace(tensor_model_parallel_size=1, params_dtype=torch.bfloat16)
    return {"args": args, "iteration": 7, "optimizer": {"optimizer": {"param_groups": GROUPS}, **more}}


def save_by_param(
    folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
) -> Path:
    state = whole_state()
    tensors = change(model_of(state))
    for kind, of_kind in by_kind(state).items():
        tensors |= {f"optimizer.state.{kind}.{name}": tensor for name, tensor in change(of_kind).items()}
    return save_dcp(folder, tensors, common(grad_scaler=SCALER))


def check(source: Source, state: dict[str, Tensor]) -> None:
    assert source.tensors.keys() == state.keys()
    assert [key for key in state if not torch.equal(source.read(key), state[key])] == []


# What megatron-core 0.9 to 0.14 saved ("fully_sharded_model_space") was compared with its own, by hand; it cannot be
# written by the version that the other tests use.


def test_open_when_state_lies_param_by_param_then_all_of_it_is_read(tmp_path: Path) -> None:
    source = torch_dist.open_torch_dist(save_by_param(tmp_path / "checkpoint"))
    check(source, whole_state())
    assert source.head.loss_scale == {"scale": 512.0, "good_steps": 5.0, "tolerated": 2.0}
    assert {group.step for group in source.head.groups} == {7}
    assert [group.options["weight_decay"] for group in source.head.groups] == [0.1, 0.0]
    assert [len(group.names) for group in source.head.groups] == [3, 3]
    assert source.head.about == {"host": "megatron-core", "format": "torch_dist, by param", "iteration": 7}


def halves_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gate, up = tensor.chunk(2) if "fc1" in name else (tensor, tensor)
        found |= {f"{name}_w": gate.clone(), f"{name}_v": up.clone()} if "fc1" in name else {name: tensor}
    return found


def test_open_when_gates_lie_apart_then_each_is_one_param_again(tmp_path: Path) -> None:
    check(torch_dist.open_torch_dist(save_by_param(tmp_path / "checkpoint", halves_apart)), whole_state())


def grid(tensor: Tensor, parts: int) -> Tensor:
    """[parts, 1 ..., elements of a part]: rows cut into parts, each flat."""
    return tensor.reshape(parts, *(1 for _ in tensor.shape[1:]), -1).clone()


def save_flat_parts(folder: Path) -> Path:
    """As megatron-core 0.9 to 0.14 with two tensor-parallel ranks; one more dimension for stacked layers."""
    state = whole_state()
    tensors = stacked(model_of(state))
    for kind, of_kind in by_kind(state).items():
        for name, tensor in stacked(of_kind).items():
            parts = 4 if "fc1" in name else 2 if "embedding" in name else 1
            each = torch.stack([grid(row, parts) for row in tensor]) if "layers." in name else grid(tensor, parts)
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
            records[key] = TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(chunks))
    manifest = Manifest("0", (writer.record(),), records, (), "")
    (folder / ".metadata").write_bytes(metadata_of(manifest))
    torch.save(common, folder / "common.pt")
    return folder


def test_open_when_parts_are_flat_then_they_have_their_shape_again(tmp_path: Path) -> None:
    check(torch_dist.open_torch_dist(save_flat_parts(tmp_path / "checkpoint")), whole_state())


def save_distrib_optim(folder: Path, *, alignment: int = 64, chained: bool = False) -> Path:
    state, flat = whole_state(), {}
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        buffer = torch.zeros(0)
        for name in reversed(SHAPES):
            gap = torch.zeros(-buffer.numel() % alignment)
            buffer = torch.cat([buffer, gap, state[f"{kind}/{name}"].reshape(-1)])
        flat["param" if kind == "main" else kind] = buffer
    flat["numel_unpadded"] = flat["param"].numel()
    rank = folder / "mp_rank_00"
    rank.mkdir(parents=True)
    buffers = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): flat}}
    torch.save([buffers, None] if chained else buffers, rank / "distrib_optim.pt")
    optimizer = {"optimizer": {"param_groups": GROUPS}, "grad_scaler": SCALER}
    model = OrderedDict((name, tensor) for name, tensor in model_of(state).items())
    content = {"args": argparse.Namespace(), "iteration": 7, "model": model}
    torch.save({**content, "optimizer": [optimizer] if chained else optimizer}, rank / "model_optim_rng.pt")
    return folder


@pytest.mark.parametrize(("alignment", "chained"), [(1, False), (64, False), (64, True)])
def test_open_when_buffers_are_of_07_or_of_08_then_all_params_are_found(
    tmp_path: Path, alignment: int, chained: bool
) -> None:
    folder = save_distrib_optim(tmp_path / "iter", alignment=alignment, chained=chained)
    assert distrib_optim.recognises(folder)
    source = distrib_optim.open_distrib_optim(folder)
    check(source, whole_state())
    assert source.head.loss_scale["scale"] == 512.0 and {group.step for group in source.head.groups} == {7}


def test_recognises_when_buffers_are_of_an_older_fork_then_not(tmp_path: Path) -> None:
    rank = save_distrib_optim(tmp_path / "iter") / "mp_rank_00"
    torch.save({0: {torch.float32: {"param": torch.zeros(3)}}}, rank / "distrib_optim.pt")
    assert not distrib_optim.recognises(tmp_path / "iter")


def save_zero(folder: Path) -> Path:
    """One rank of DeepSpeed."""
    state = whole_state()
    flats = {kind: torch.cat([state[f"{kind}/{name}"].reshape(-1) for name in SHAPES]) for kind in ("main", *KINDS[1:])}
    inner = {"step": torch.tensor(7.0), "exp_avg": flats["exp_avg"], "exp_avg_sq": flats["exp_avg_sq"]}
    base = {"state": {0: inner}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    optimizer = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flats["main"]], "zero_stage": 1}
    folder.mkdir()
    torch.save({"optimizer_state_dict": optimizer}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model = {"param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}], "skipped_steps": 3}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def test_open_when_deepspeed_has_one_rank_then_all_params_are_found(tmp_path: Path) -> None:
    source = zero.open_deepspeed_zero(save_zero(tmp_path / "step"))
    check(source, whole_state())
    assert source.head.num_skipped == 3 and source.head.groups[0].step == 7


def save_universal(folder: Path) -> Path:
    for key, tensor in whole_state().items():
        kind, name = key.split("/")
        place = folder / "zero" / name
        place.mkdir(parents=True, exist_ok=True)
        # Of ZeRO stage 3 a tensor is flat, and not in a dict.
        content = tensor.reshape(-1) if kind == "exp_avg" else {"param": tensor, "cat_dim": 0}
        torch.save(content, place / f"{'fp32' if kind == 'main' else kind}.pt")
        torch.save(torch.tensor(7.0), place / "step.pt")
    torch.save({"param_groups": [{"lr": 1e-3, "params": [0]}]}, folder / "zero" / "optimizer_state.pt")
    model = {"param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}]}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def test_open_when_a_universal_tensor_is_flat_then_it_has_its_shape_again(tmp_path: Path) -> None:
    check(universal.open_deepspeed_universal(save_universal(tmp_path / "universal")), whole_state())


#: Of every format: how to make it, its reader, and its files.
FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Source], tuple[str, ...]]] = {
    "torch_dist": (save_by_param, torch_dist.open_torch_dist, (".metadata", "common.pt", "__0_0.distcp")),
    "distrib_optim": (
        save_distrib_optim,
        distrib_optim.open_distrib_optim,
        ("mp_rank_00/distrib_optim.pt", "mp_rank_00/model_optim_rng.pt"),
    ),
    "deepspeed_zero": (
        save_zero,
        zero.open_deepspeed_zero,
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    ),
    "deepspeed_universal": (
        save_universal,
        universal.open_deepspeed_universal,
        (
            *(f"zero/embedding.word_embeddings.weight/{name}.pt" for name in ("fp32", "exp_avg", "step")),
            "zero/optimizer_state.pt",
            "mp_rank_00_model_states.pt",
        ),
    ),
}
FILES = [(name, file) for name, (_, _, files) in FORMATS.items() for file in files]


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def read_all(name: str, folder: Path) -> None:
    source = FORMATS[name][1](folder)
    for key in source.tensors:
        source.read(key)


def contents(evil: Evil, old: bytes) -> dict[str, bytes]:
    """What a file may be replaced with: a pickle, what torch saves, and the same nested in what is expected."""
    import io

    found = {"pickle": pickle.dumps(evil), "old pickle": pickle.dumps(evil, protocol=0)}
    for how, value in {"torch": evil, "nested": {"optimizer": [torch.zeros(3), {"state": evil}]}}.items():
        file = io.BytesIO()
        torch.save(value, file)
        found[how] = file.getvalue().ljust(len(old), b"\0") if how == "torch" else file.getvalue()
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=False)
        found[f"{how}, old format"] = file.getvalue()
    return found


@pytest.mark.parametrize(("name", "file"), FILES)
def test_open_when_a_file_would_execute_code_then_it_does_not(tmp_path: Path, name: str, file: str) -> None:
    marker = tmp_path / "executed"
    evil = Evil(marker)
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
def test_open_when_a_file_is_cut_off_then_it_is_refused(tmp_path: Path, name: str, file: str) -> None:
    folder = FORMATS[name][0](tmp_path / "checkpoint")
    whole = (folder / file).read_bytes()
    for numel in (0, len(whole) // 2, len(whole) - 1):
        (folder / file).write_bytes(whole[:numel])
        with pytest.raises(CheckpointError):
            read_all(name, folder)


@pytest.mark.parametrize("content", [[], {"optimizer_state_dict": {}, "model": {}}, {"optimizer": 3}])
@pytest.mark.parametrize(("name", "file"), [each for each in FILES if not each[1].startswith((".meta", "__0"))])
def test_open_when_a_file_holds_something_else_then_it_is_refused_or_not_needed(
    tmp_path: Path, name: str, file: str, content: Any
) -> None:
    folder = FORMATS[name][0](tmp_path / "checkpoint")
    torch.save(content, folder / file)
    with pytest.raises(CheckpointError):
        read_all(name, folder)


def test_metadata_when_it_names_a_function_then_it_is_refused(tmp_path: Path) -> None:
    folder = save_by_param(tmp_path / "checkpoint")
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    with pytest.raises(CheckpointError) as error:
        open_dcp(folder)
    assert_says(
        str(error.value),
        f"Invalid file {path}: it names posix.system. Must be the metadata of a torch checkpoint. "
        "Give a file that the training wrote, unchanged.",
    )


def test_metadata_when_it_names_a_file_elsewhere_then_it_is_refused(tmp_path: Path) -> None:
    folder = save_by_param(tmp_path / "checkpoint")
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(CheckpointError) as error:
        open_dcp(folder)
    assert_says(
        str(error.value),
        f"Invalid file {path}: ValueError(\"'../../passwd' is no file name\"). Must say of every tensor where it is. "
        "Load an earlier checkpoint; this one is damaged or incomplete.",
    )


def test_file_when_it_names_what_is_unknown_then_the_user_may_allow_it(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"path": tmp_path, "what": pytest.ExitCode.OK}, path)
    with pytest.raises(CheckpointError) as error:
        load_file(path)
    assert_says(
        str(error.value),
        f"Invalid file {path}: it names pytest.ExitCode. Must hold tensors, plain values, and what Megatron and "
        "DeepSpeed save. If you trust it, convert it in Python after "
        "torch.serialization.add_safe_globals([pytest.ExitCode]).",
    )


def test_file_when_it_holds_objects_of_megatron_then_they_are_inert(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"args": argparse.Namespace(bf16=True), "w": torch.arange(3)}, path)
    found = load_file(path)
    assert type(found["args"]) is Inert and found["args"].bf16 is True
    assert torch.equal(found["w"], torch.arange(3))
    assert type(load_bytes(path.read_bytes(), "bytes")["args"]) is Inert


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer")},
            "no optimizer state. Must have optimizer state by param, or in buckets of megatron-core's distributed "
            "optimizer. Save it without --no-save-optim.",
        ),
        (
            lambda tensors: {"optimizer.distopt.main.w": torch.zeros(2), "w": torch.zeros(2)},
            "optimizer state 'optimizer.distopt'. Must have optimizer state by param, or in buckets of megatron-core's "
            "distributed optimizer. Load it where it was written, and save it in another format.",
        ),
        (
            lambda tensors: {key: tensor for key, tensor in tensors.items() if "fp32_param" not in key},
            "no fp32 values of 'decoder.final_layernorm.weight'. Must hold main params and what the optimizer keeps "
            "of them. Load it where it was written, and save it in another format.",
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
    with pytest.raises(CheckpointError) as error:
        torch_dist.open_torch_dist(folder)
    assert_says(str(error.value), f"Invalid checkpoint {folder}: {text}")


def test_open_when_groups_are_of_no_known_rule_then_what_they_share_is_kept(tmp_path: Path) -> None:
    groups = [{**GROUPS[0], "lr_mult": mult} for mult in (1.0, 0.1, 0.01)]
    state = whole_state()
    tensors = {f"optimizer.state.fp32_param.{key[5:]}": tensor for key, tensor in state.items() if key[:5] == "main/"}
    folder = save_dcp(tmp_path / "checkpoint", tensors, {"optimizer": {"optimizer": {"param_groups": groups}}})
    (group,) = torch_dist.open_torch_dist(folder).head.groups
    assert set(group.names) == set(SHAPES) and group.step == 7
    assert "lr_mult" not in group.options and group.options["weight_decay"] == 0.1


def test_open_when_groups_have_other_steps_then_it_is_refused(tmp_path: Path) -> None:
    groups = [{**group, "step": 7 + number} for number, group in enumerate(GROUPS)]
    tensors = {f"optimizer.state.fp32_param.{name}": torch.zeros(shape) for name, shape in SHAPES.items()}
    folder = save_dcp(tmp_path / "checkpoint", tensors, {"optimizer": {"optimizer": {"param_groups": groups}}})
    with pytest.raises(CheckpointError) as error:
        torch_dist.open_torch_dist(folder)
    assert_says(
        str(error.value),
        f"Invalid update count in {folder}: 7, 8. Must be the same for all params. "
        "Convert a run whose params were all trained from its start.",
    )
