"""Files of the forks of 2023, read and written without a fork: every tensor where it belongs, and
what is refused.

The files are those of tests/support/fork_files.py, a second account of the formats, of 19 small
params.

Exercises formats/common.py, formats/megatron_2023/file_state.py, formats/megatron_2023/gathered.py,
formats/megatron_2023/per_rank.py, formats/megatron_2023/plain.py,
formats/megatron_2023/saved_shards.py.
"""

from __future__ import annotations

import itertools
import os
import pickletools
import random
import shutil
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint import disk, is_checkpoint
from megatron_distopt.checkpoint.source import Source, write_checkpoint
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import convert, open_any
from megatron_distopt.formats.megatron_2023.model_file import placement_of, registered
from tests.support.fork_files import EMBEDDING, MOMENTS, Fork, Trap, changed
from tests.support.refusals import assert_mentions, refused
from tests.support.values import same

FP32, FP16 = torch.float32, torch.float16
#: By name: what is special about a run, for every layout of its files.
RUNS: dict[str, Fork] = {
    "bf16": Fork(),
    "fp32": Fork(dtype=FP32),
    "fp16": Fork(dtype=FP16),
    "fp32 norms, two grad dtypes": Fork(fp32_norms=True, dtype=FP16),
    "dp7, which pads": Fork(dp=7),
    "tp2 pp2, gated": Fork(tp=2, pp=2, swiglu=True),
    "pp2, two chunks": Fork(pp=2, chunks=2, layers=4),
}
LAYOUTS = ("gathered", "per-rank", "plain")
#: Each run in the files of one layout, and the plain one and that of all cuts in all of them. (The
#: fork's own optimizer gathers groups of two dtypes in another order than it says.)
CASES = [(name, layout) for name in ("bf16", "tp2 pp2, gated") for layout in LAYOUTS]
CASES += [("fp32", "gathered"), ("fp16", "per-rank"), ("fp32 norms, two grad dtypes", "plain")]
CASES += [
    ("dp7, which pads", "gathered"),
    ("dp7, which pads", "per-rank"),
    ("pp2, two chunks", "gathered"),
]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses its power, and a busy disk takes seconds to be sure of that."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _write(fork: Fork, layout: str, folder: Path) -> Path:
    return replace(fork, layout=layout).write(folder)


def _tensors(source: Source) -> dict[str, Tensor]:
    return {key: source.read(key) for key in source.tensors}


# Reading.


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_open_any_when_a_fork_wrote_then_every_tensor_is_whole(
    name: str, layout: str, tmp_path: Path
) -> None:
    fork = RUNS[name]
    source = open_any(_write(fork, layout, tmp_path / "iter"))
    assert same(_tensors(source), fork.tensors)
    infos = {key: (info.shape, info.dtype) for key, info in source.tensors.items()}
    assert infos == {key: (tuple(tensor.shape), "float32") for key, tensor in fork.tensors.items()}
    scale = {"scale": 1024.0, "good_steps": 3.0, "tolerated": 1.0}
    assert source.head.loss_scale == (scale if fork.dtype is FP16 else {})
    decaying, other = source.head.groups
    assert (decaying.step, other.step) == (10, 10)
    assert {*decaying.names} == {param.name for param in fork.params if param.decays}
    assert {*other.names} == {param.name for param in fork.params if not param.decays}
    options = {
        "name": "wd_no_scale_lr",
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "lr": 1e-3,
        "bias_correction": True,
    }
    assert decaying.options == {**options, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("layout", ["per-rank", "plain"])
def test_open_any_when_nothing_was_updated_yet_then_there_are_main_params_alone(
    layout: str, tmp_path: Path
) -> None:
    fork = Fork(step=0, tp=2)
    source = open_any(_write(fork, layout, tmp_path / "iter"))
    assert same(_tensors(source), fork.tensors)
    assert {key.partition("/")[0] for key in source.tensors} == {"main"}
    assert {group.step for group in source.head.groups} == {0}


def test_open_any_when_some_params_were_never_updated_then_their_moments_are_zero(
    tmp_path: Path,
) -> None:
    fork = Fork()
    path = _write(fork, "plain", tmp_path / "iter") / "mp_rank_00/model_optim_rng.pt"
    with changed(path) as state:
        del state["optimizer"]["optimizer"]["state"][0]
    tensors = _tensors(open_any(tmp_path / "iter"))
    zero = {f"{kind}/{EMBEDDING}": torch.zeros(8, 4) for kind in MOMENTS}
    assert same(tensors, {**fork.tensors, **zero})


def test_open_any_when_torchs_adam_counts_in_the_state_then_the_groups_have_the_count(
    tmp_path: Path,
) -> None:
    fork = Fork(step=None)
    for layout, name in (
        ("plain", "mp_rank_00/model_optim_rng.pt"),
        ("per-rank", "mp_rank_00_001/optim.pt"),
    ):
        folder = _write(fork, layout, tmp_path / layout)
        with changed(folder / name) as state:
            for kept in state["optimizer"]["optimizer"]["state"].values():
                kept["step"] = torch.tensor(7.0)
        source = open_any(folder)
        assert {group.step for group in source.head.groups} == {7}
        assert same(_tensors(source), fork.tensors)


def test_open_any_when_the_fork_is_of_before_2023_then_groups_are_told_apart_by_their_decay(
    tmp_path: Path,
) -> None:
    folder = _write(Fork(), "plain", tmp_path / "iter")
    with changed(folder / "mp_rank_00/model_optim_rng.pt") as state:
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            for key in ("name", "wd_mult", "lr_mult"):
                del group[key]
    assert [len(group.names) for group in open_any(folder).head.groups] == [10, 9]


def test_open_any_when_ranks_drifted_apart_in_the_last_bits_then_the_first_speaks(
    tmp_path: Path,
) -> None:
    fork = Fork(tp=2, layout="plain")
    folder = fork.write(tmp_path / "iter")
    with changed(folder / "mp_rank_01/model_optim_rng.pt") as state:
        state["optimizer"]["fp32_from_fp16_params"][0][1].mul_(1 + 2**-20)
    assert same(_tensors(open_any(folder)), fork.tensors)


def test_open_any_when_the_copy_of_the_tied_embedding_drifted_then_the_first_stage_speaks(
    tmp_path: Path,
) -> None:
    fork = Fork(pp=2)
    folder = fork.write(tmp_path / "iter")
    with changed(folder / "mp_rank_00_001/distrib_optim.pt") as state:
        state[0][FP32]["exp_avg"][:32] = 5.0  # it was registered last, and so lies first
    assert same(_tensors(open_any(folder)), fork.tensors)


#: A state dict in the order in which a fork saves it; the numbers say in which it registers the
#: params.
SAVED = {
    "language_model": {
        "embedding": {"word_embeddings": {"weight": 1}, "position_embeddings": {"weight": 2}},
        "encoder": {"layers.0.input_layernorm.weight": 3, "layers.0._extra_state": None},
        "pooler": {"dense.weight": 6},
        "output_layer": {"weight": 7},
        "decoder": {"layers.0.inter_attention.dense.weight": 4, "final_layernorm.weight": 5},
        "lm_head": 0,
    },
    "lm_head": {"bias": 9, "dense.weight": 10},
    "binary_head": {"weight": 11},
    "word_embeddings_for_head": {"weight": 8},
}


def test_registered_when_a_module_is_saved_out_of_order_then_the_params_are_in_order() -> None:
    def tensors(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: tensors(value) for key, value in tree.items()}
        return None if tree is None else torch.full((2,), float(tree))

    assert [int(tensor[0]) for _, tensor in registered(tensors(SAVED))] == [*range(12)]
    flat = {
        "b.weight": torch.zeros(1),
        "a.weight": torch.ones(1),
        "a.steps": torch.tensor(3),
        "module.c": torch.ones(2),
    }
    flat |= {
        "a.tied": flat["a.weight"],
        "rope.inv_freq": torch.ones(2),
        "a._extra_state": torch.ones(2),
    }
    assert [name for name, _ in registered(flat)] == ["b.weight", "a.weight", "c"]


@pytest.mark.parametrize(
    ("name", "dim", "stride", "is_padded"),
    [
        ("language_model.lm_head", 0, 1, True),
        ("lm_head.bias", 0, 1, True),
        ("lm_head.dense.weight", None, 1, False),
        ("encoder.layers.1.self_attention.query.weight", 0, 1, False),
        ("encoder.layers.1.self_attention.key_value.weight", None, 1, False),
        ("decoder.layers.1.inter_attention.key_value.weight", 0, 1, False),
        ("encoder.layers.1.mlp.local_experts.3.dense_h_to_4h.weight", 0, 2, False),
    ],
)
def test_placement_when_a_param_has_a_name_of_megatrons_then_it_is_cut_as_there(
    name: str, dim: int | None, stride: int, is_padded: bool
) -> None:
    placement = placement_of(name, (4, 4), (1, 2), is_gated=True)
    assert (placement.dim, placement.stride, placement.is_padded) == (dim, stride, is_padded)
    assert (placement.rank, placement.size) == ((1, 2) if dim is not None else (0, 1))


def test_open_any_when_a_path_is_of_ours_then_it_is_read_whatever_names_it(tmp_path: Path) -> None:
    fork = Fork(tp=2)
    folder = convert(fork.write(tmp_path / "iter"), tmp_path / "ours", "distopt").path
    inside = folder / "distrib_optim.distopt"
    for path in (folder, inside, inside / "manifest.json"):
        assert same(_tensors(open_any(path)), fork.tensors)


# Converting.


@pytest.mark.parametrize(("name", "layout"), CASES[6:])
def test_convert_when_there_and_back_then_every_file_is_the_same(
    name: str, layout: str, tmp_path: Path
) -> None:
    """By way of a format of names; what was padding is zero in the files that are written."""
    start = _write(RUNS[name], layout, tmp_path / "start")
    first = convert(start, tmp_path / "first", "distopt")
    assert (first.found, first.is_iteration) == (layout, True)
    back = convert(first.path, tmp_path / "back", first.found)
    _check_same_files(start, back.path, RUNS[name])


def test_convert_when_through_all_layouts_then_the_files_are_the_same(tmp_path: Path) -> None:
    name = "tp2 pp2, gated"
    start = path = _write(RUNS[name], "gathered", tmp_path / "start")
    for number, to in enumerate(("per-rank", "plain", "distopt", "plain", "per-rank", "gathered")):
        path = convert(path, tmp_path / f"{number}", to).path
    _check_same_files(start, path, RUNS[name])


def test_convert_when_nothing_was_updated_yet_then_a_gathered_file_alone_has_moments(
    tmp_path: Path,
) -> None:
    start = _write(Fork(step=0), "per-rank", tmp_path / "start")
    there = convert(start, tmp_path / "there", "plain").path
    _check_same_files(start, convert(there, tmp_path / "back", "per-rank").path, Fork())
    gathered = convert(there, tmp_path / "new", "gathered").path / "mp_rank_00/distrib_optim.pt"
    tensors = torch.load(gathered, weights_only=True)[0][FP32]
    assert {kind: bool(tensors[kind].any()) for kind in tensors} == {
        "param": True,
        **dict.fromkeys(MOMENTS, False),
    }


def _check_same_files(start: Path, back: Path, fork: Fork) -> None:
    names = sorted(str(path.relative_to(start)) for path in start.rglob("*.pt"))
    assert names == sorted(str(path.relative_to(back)) for path in back.rglob("*.pt"))
    for name in names:
        one, other = (torch.load(folder / name, weights_only=False) for folder in (start, back))
        if name.endswith("distrib_optim.pt"):
            assert other.pop("megatron_distopt") == {"format": 1, "step": 10}
            _check_padding(one, other)
        for state in _states_in(other):
            assert state.pop("step") == 10  # where torch's and DeepSpeed's classes look for it
        assert same(one, other), name


def _states_in(file: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """What an inner optimizer keeps for each param in a file."""
    entry = file.get("optimizer", {})
    return list(entry.get("optimizer", entry).get("state", {}).values())


def _check_padding(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    """It is of the same size, and is dropped from both."""
    for chunk, dtypes in one.items():
        for dtype, tensors in dtypes.items():
            for kind, tensor in tensors.items():
                made, is_padding = other[chunk][dtype][kind], tensor == 7e7
                assert made.shape == tensor.shape
                assert not made[is_padding].any()
                tensors[kind], other[chunk][dtype][kind] = tensor[~is_padding], made[~is_padding]


def test_convert_when_another_number_of_ranks_will_read_then_files_are_cut_for_it(
    tmp_path: Path,
) -> None:
    start = Fork(dp=2).write(tmp_path / "start")
    own = convert(start, tmp_path / "own", "per-rank", dp=5).path
    assert same(_tensors(open_any(own)), Fork().tensors)
    _check_same_files(_write(Fork(dp=5), "per-rank", tmp_path / "wanted"), own, Fork())
    gathered = convert(own, tmp_path / "gathered", "gathered", dp=7).path
    _check_same_files(
        _write(Fork(dp=7), "gathered", tmp_path / "wanted gathered"), gathered, Fork()
    )


def test_convert_when_to_torch_then_plain_containers_hold_it_and_come_back(tmp_path: Path) -> None:
    fork = Fork(tp=2, dtype=FP16, layout="per-rank")
    converted = convert(fork.write(tmp_path / "iter"), tmp_path / "state.pt", "torch")
    assert (converted.found, converted.is_iteration) == ("per-rank", False)
    state = torch.load(converted.path, weights_only=True)
    assert same(state["tensors"], fork.tensors)
    assert [group["step"] for group in state["groups"]] == [10, 10]
    ours = convert(converted.path, tmp_path / "ours", "distopt")
    assert is_checkpoint(ours.path)
    again = convert(ours.path, tmp_path / "again.pt", "torch").path
    about = {"about": None}  # ours says which version wrote it
    assert same({**torch.load(again, weights_only=True), **about}, {**state, **about})


def test_convert_when_the_target_ends_in_distopt_then_it_is_the_state_alone(tmp_path: Path) -> None:
    converted = convert(Fork().write(tmp_path / "iter"), tmp_path / "state.distopt", "distopt")
    assert not converted.is_iteration
    assert is_checkpoint(converted.path)
    assert not [*converted.path.glob("mp_rank_*")]


class ModelType(Enum):
    """As of a fork, see the next test."""

    encoder_or_decoder = 1


def _by_name(member: Enum, _: int) -> tuple[Any, tuple[type[Enum], str]]:
    """How Python 3.11.0 to 3.11.3 pickles a member of an enum."""
    return getattr, (type(member), member.name)


def _by_value(member: Enum, _: int) -> tuple[Any, tuple[Any]]:
    """How every other one does."""
    return type(member), (member.value,)


@pytest.mark.parametrize("pickled", [_by_name, _by_value])
def test_convert_when_the_fork_is_not_installed_then_its_enums_stay_what_they_are(
    pickled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelType, "__reduce_ex__", pickled)
    fork = ModuleType("megatron.core.enums")
    monkeypatch.setattr(ModelType, "__module__", fork.__name__)
    fork.ModelType = ModelType  # type: ignore[attr-defined]
    with monkeypatch.context() as while_it_runs:
        for name in ("megatron", "megatron.core", "megatron.core.enums"):
            while_it_runs.setitem(sys.modules, name, fork)
        options = {
            "model_type": ModelType.encoder_or_decoder,
            "both": [ModelType.encoder_or_decoder] * 2,
        }
        source = Fork(options=options).write(tmp_path / "iter")
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    # megatron-core makes its enums known to torch where it is imported.
    with torch.serialization.safe_globals([ModelType]):
        path = convert(source, tmp_path / "plain", "plain").path / "mp_rank_00/model_optim_rng.pt"
        assert ModelType in torch.serialization.get_safe_globals()
    with zipfile.ZipFile(path) as file:
        names = {
            arg
            for op, arg, _ in pickletools.genops(file.read("archive/data.pkl"))
            if op.name == "GLOBAL"
        }
    assert "megatron.core.enums ModelType" in names
    assert not [name for name in names if "megatron_distopt" in str(name)]
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, fork)
    args = torch.load(path, weights_only=False)["args"]
    assert args.model_type is ModelType.encoder_or_decoder
    assert args.both == [ModelType.encoder_or_decoder] * 2


def test_convert_when_a_file_asks_for_an_attribute_of_something_else_then_it_gets_none(
    tmp_path: Path,
) -> None:
    source = Fork().write(tmp_path / "iter")
    with changed(source / "mp_rank_00/model_optim_rng.pt") as state:
        state["args"].asked = _Attribute()
    with pytest.raises(
        CheckpointError, match="it asks for an attribute of something that is not an enum"
    ):
        convert(source, tmp_path / "plain", "plain")


class _Attribute:
    """Pickled, it asks for an attribute of a class that a file may name."""

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (Namespace, "__init__")


def test_convert_when_numpys_random_state_is_saved_then_it_is_kept(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    source = Fork().write(tmp_path / "iter")
    rng = {"np_rng_state": numpy.random.get_state(), "random_rng_state": random.getstate()}
    with changed(source / "mp_rank_00/model_optim_rng.pt") as state:
        state["rng_state"] = [rng]
    plain = convert(source, tmp_path / "plain", "plain").path / "mp_rank_00/model_optim_rng.pt"
    (kept,) = torch.load(plain, weights_only=False)["rng_state"]
    assert kept["random_rng_state"] == rng["random_rng_state"]
    assert kept["np_rng_state"][0] == "MT19937"
    assert numpy.array_equal(kept["np_rng_state"][1], rng["np_rng_state"][1])


@pytest.mark.parametrize("to", ["distopt", "per-rank"])
def test_convert_when_the_disk_fails_then_there_is_no_target(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call that changes the disk."""
    source = Fork().write(tmp_path / "iter")
    before = {path: path.read_bytes() for path in source.rglob("*.pt")}
    folder = tmp_path / "target"
    for failing in itertools.count(1):
        folder.mkdir()
        with monkeypatch.context() as failing_disk:
            calls = _fail_at(failing, failing_disk)
            if not _raises(lambda: convert(source, folder / "new", to)):
                break
        assert [path.name for path in folder.iterdir()] == [], failing
        shutil.rmtree(folder)
    assert next(calls) == failing  # none of its calls failed
    assert failing > 1
    assert before == {path: path.read_bytes() for path in source.rglob("*.pt")}


def test_convert_when_the_disk_is_full_in_the_middle_of_a_file_then_there_is_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write = Fork().write(tmp_path / "iter"), disk.write

    def full(file: Any, data: Any) -> None:
        if file.tell() + len(data) > 4096:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(disk, "write", full)
    assert _raises(lambda: convert(source, tmp_path / "new", "plain"))
    assert [path.name for path in tmp_path.iterdir()] == ["iter"]


def _fail_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That call of all to `disk`, from 1, raises; returns what counts them."""
    calls = itertools.count(1)
    for name in ("create", "sync", "replace"):
        call = getattr(disk, name)

        def counted(*args: Any, call: Callable[..., Any] = call) -> Any:
            if next(calls) == number:
                raise OSError(28, "No space left on device")
            return call(*args)

        monkeypatch.setattr(disk, name, counted)
    return calls


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except CheckpointError as error:
        assert "No space left on device" in str(error)
        return True
    return False


# What is refused.


FILES = {
    "mp_rank_00/model_optim_rng.pt": "gathered",
    "mp_rank_00/distrib_optim.pt": "gathered",
    "mp_rank_00/model_rng.pt": "per-rank",
    "mp_rank_00_000/optim.pt": "per-rank",
    "mp_rank_00_001/optim.pt": "per-rank",
}


@pytest.mark.parametrize("name", FILES)
def test_open_any_when_a_pickle_would_call_something_then_nothing_is_called(
    name: str, tmp_path: Path
) -> None:
    made, folder = tmp_path / "made by a pickle", _write(Fork(), FILES[name], tmp_path / "iter")
    with changed(folder / name) as state:
        state["args"] = Namespace(tensor_model_parallel_size=1, more=Trap(str(made)))
        state["optimizer"] = [Trap(f"__import__('os').mkdir({str(made)!r})", eval)]
    _check_refused(lambda: open_any(folder), folder, "may hold only tensors, plain values")
    assert not made.exists()


def _missing(folder: Path, name: str) -> Path:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


#: By name: a file of one layout, and what in it is not as it must be.
STRANGE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "no model": ("mp_rank_00/model_optim_rng.pt", lambda state: state.pop("model")),
    "no head": ("mp_rank_00/model_optim_rng.pt", lambda state: state.update(optimizer={})),
    "no main params": ("mp_rank_00/distrib_optim.pt", lambda state: state[0][FP32].pop("param")),
    "a short tensor": (
        "mp_rank_00/distrib_optim.pt",
        lambda state: state[0][FP32].update(exp_avg=torch.zeros(9)),
    ),
    "a short shard": (
        "mp_rank_00_001/optim.pt",
        lambda state: state["optimizer"]["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
    ),
    "no state of a rank": (
        "mp_rank_00_000/optim.pt",
        lambda state: state["optimizer"]["optimizer"].pop("state"),
    ),
}


def _with_model_file(folder: Path, change: Callable[[Any], object]) -> Path:
    with changed(folder / "mp_rank_00/model_optim_rng.pt") as state:
        change(state)
    return folder


def _one_too_many(folder: Path) -> Path:
    shutil.copytree(folder / "mp_rank_01_001", folder / "mp_rank_02_001")
    return _missing(folder, "mp_rank_01_000")


def _tracker(folder: Path) -> Path:
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def _strange(folder: Path, name: str, change: Callable[[Any], object]) -> Path:
    with changed(_write(Fork(), FILES[name], folder) / name) as state:
        change(state)
    return folder


def _single(path: Path, **content: Any) -> Path:
    torch.save(content, path)
    return path


def _freeze(state: Any) -> None:
    state["model"]["frozen"] = {"weight": torch.zeros(3, 4, dtype=torch.bfloat16)}


def _count_again(state: Any) -> None:
    state["optimizer"]["optimizer"]["param_groups"][1]["step"] = 9


def _with_another_group(layout: str, folder: Path) -> Path:
    _write(Fork(dp=1), layout, folder)
    name = "mp_rank_00_000/optim.pt" if layout == "per-rank" else "mp_rank_00/model_optim_rng.pt"
    with changed(folder / name) as state:
        groups = state["optimizer"]["optimizer"]["param_groups"]
        groups.append({**groups[0], "name": "wd_scale_lr", "lr_mult": 0.1})
    return folder


def _with_model_of_another_seed(layout: str, folder: Path) -> Path:
    _write(Fork(), layout, folder)
    name = f"mp_rank_00/{MODEL_FILES[layout]}"
    with (
        changed(_write(Fork(seed=1), layout, folder.with_name("other")) / name) as theirs,
        changed(folder / name) as state,
    ):
        state["model"] = theirs["model"]
    return folder


def _with_unknown_names(folder: Path) -> Path:
    Fork(tp=2, layout="plain").write(folder)
    for rank in range(2):
        with changed(folder / f"mp_rank_{rank:02d}/model_optim_rng.pt") as state:
            language = state["model"]["language_model"]
            language["encoder"] = {
                key.replace("mlp.dense_h_to_4h.weight", "mlp.up.weight"): value
                for key, value in language["encoder"].items()
            }
    return folder


def _ours(to: Path, seed: int = 0) -> Path:
    return convert(
        Fork(seed=seed).write(to.with_name(f"{to.name} of seed {seed}")), to, "distopt"
    ).path


def _ours_of_another_model(to: Path) -> Path:
    ours, other = _ours(to), _ours(to.with_name("other"), seed=1)
    shutil.rmtree(ours / "distrib_optim.distopt")
    shutil.copytree(other / "distrib_optim.distopt", ours / "distrib_optim.distopt")
    return ours


def _without_a_param(state: Any) -> None:
    del state["model"]["language_model"]["encoder"]["layers.1.mlp.dense_h_to_4h.bias"]


MODEL_FILES = {
    "gathered": "model_optim_rng.pt",
    "per-rank": "model_rng.pt",
    "plain": "model_optim_rng.pt",
}
NUMEL = sum(each.numel() for key, each in Fork().tensors.items() if key.startswith("main/"))
ANY, MODEL_FILE = ("manifest.json", "'convert --to torch'"), "mp_rank_00/model_optim_rng.pt"
ALL_MACHINES, ITS_OWN_FORK = (
    "Copy the whole iteration folder",
    "this one loads only in its own fork",
)
#: By name: how to make a checkpoint, and what is said of it beside its path.
REFUSED: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "nowhere": (lambda to: to, ("does not exist", *ANY, "SAVE/iter_0000010")),
    "a --save folder": (_tracker, (*ANY, "SAVE/iter_0000010")),
    "no optimizer": (
        lambda to: _missing(Fork().write(to), "mp_rank_00/distrib_optim.pt"),
        (f"{{}}/{MODEL_FILE}", "--no-save-optim"),
    ),
    "a model file too few": (
        lambda to: _missing(Fork(tp=2, pp=2).write(to), "mp_rank_01_000"),
        ("3 model files", "2 tensor-parallel ranks and 2 pipeline stages", ALL_MACHINES),
    ),
    "another model file": (
        lambda to: _one_too_many(Fork(tp=2, pp=2).write(to)),
        ("4 model files", ALL_MACHINES),
    ),
    "a rank too few": (
        lambda to: _missing(Fork(layout="per-rank", dp=3).write(to), "mp_rank_00_001"),
        ("{}/mp_rank_00_001/optim.pt", "3 data-parallel ranks", "all optim.pt of one save"),
    ),
    "several counts": (
        lambda to: _with_model_file(Fork().write(to), _count_again),
        ("9, 10", "from its start"),
    ),
    "frozen params, gathered": (
        lambda to: _with_model_file(Fork().write(to), _freeze),
        (f"param of shape [{NUMEL}] in chunk 0", f"{NUMEL + 12} elements", "without frozen params"),
    ),
    "frozen params, plain": (
        lambda to: _with_model_file(_write(Fork(), "plain", to), _freeze),
        ("10 params in group 0, 10 of them", "the model has 11", "without frozen params"),
    ),
    "experts": (
        lambda to: Fork(options={"moe_expert_parallel_size": 2}).write(to),
        (f"{{}}/{MODEL_FILE}", "--moe-expert-parallel-size", ITS_OWN_FORK),
    ),
    "a stage of its own": (
        lambda to: Fork(pp=2, options={"standalone_embedding_stage": True}).write(to),
        ("stage 0", "1 of 2 layers", "each of 2 stages", ITS_OWN_FORK),
    ),
    "another single file": (
        lambda to: _single(to, format="another"),
        ("format 'another'", "'convert --to torch'"),
    ),
    "a class of the user": (
        lambda to: Fork(options={"extra": Fork()}).write(to),
        (f"{{}}/{MODEL_FILE}", "add_safe_globals([tests.support.fork_files.Fork])"),
    ),
    **{
        f"groups that do not say which param is where, {layout}": (
            partial(_with_another_group, layout),
            (
                "{}/mp_rank_00",
                "(name=wd_no_scale_lr, wd_mult=1.0, lr_mult=1.0), (name=wd_scale_lr, wd_mult=1.0, "
                "lr_mult=0.1), (name=no_wd_no_scale_lr, wd_mult=0.0, lr_mult=1.0)",
                "decaying and not decaying",
                "in its own fork with this package installed, and convert what that run saves",
            ),
        )
        for layout in LAYOUTS
    },
    "a group of two dtypes, gathered by the fork": (
        lambda to: Fork(fp32_norms=True).write(to),
        (
            "{}/mp_rank_00/distrib_optim.pt",
            "fp32",
            "16-bit",
            "a run without the distributed optimizer",
        ),
    ),
    **{name: (lambda to, how=how: _strange(to, *how), ()) for name, how in STRANGE.items()},
    "a single file of lists": (
        lambda to: _single(
            to, format="megatron_distopt.torch", version=1, tensors={"main/a": [1.0]}
        ),
        ("'convert --to torch'", "Convert it again"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_open_any_when_a_checkpoint_is_not_whole_or_not_known_then_it_says_what_and_what_to_do(
    name: str, tmp_path: Path
) -> None:
    make, words = REFUSED[name]
    path = make(tmp_path / "checkpoint")
    _check_refused(lambda: open_any(path), path, "{}", *words)
    _check_refused(lambda: convert(path, tmp_path / "new", "distopt"), path, "{}", *words)


def _check_refused(call: Callable[[], object], path: Path, *words: str) -> None:
    """In the words {} is the path; nothing is written."""
    assert_mentions(
        refused(CheckpointError, call), *(word.replace("{}", str(path)) for word in words)
    )
    assert not path.with_name("new").exists()


def test_open_any_when_a_file_is_damaged_then_it_says_which(tmp_path: Path) -> None:
    for name, layout in FILES.items():
        folder = _write(Fork(), layout, tmp_path / name.replace("/", "_"))
        whole = (folder / name).read_bytes()
        for bad in (whole[: len(whole) // 2], b"not a checkpoint", b""):
            (folder / name).write_bytes(bad)
            with pytest.raises(
                CheckpointError, match=f"^File {folder / name} is damaged: .* Give a file"
            ):
                open_any(folder)


def test_open_any_when_the_user_allows_a_class_then_it_is_read_and_allowed_as_before(
    tmp_path: Path,
) -> None:
    folder = Fork(options={"extra": Fork()}).write(tmp_path / "iter")
    with torch.serialization.safe_globals([Fork, (Namespace, "argparse.Namespace")]):
        before = torch.serialization.get_safe_globals()
        assert len(open_any(folder).tensors) == 57
        assert {*map(str, torch.serialization.get_safe_globals())} == {*map(str, before)}


def test_open_any_when_a_higher_rank_left_a_file_then_it_is_not_read(tmp_path: Path) -> None:
    folder = Fork(layout="per-rank", dp=2).write(tmp_path / "iter")
    (folder / "mp_rank_00_002").mkdir()
    (folder / "mp_rank_00_002/optim.pt").write_text("of an earlier save")
    assert same(_tensors(open_any(folder)), Fork().tensors)


def test_open_any_when_the_count_is_lost_then_the_rest_can_be_looked_at(tmp_path: Path) -> None:
    source = open_any(Fork(step=None).write(tmp_path / "iter"))
    assert {group.step for group in source.head.groups} == {None}, "it invents an update count"
    assert same(_tensors(source), Fork().tensors)


@pytest.mark.parametrize("kind", ["gathered", "ours"])
def test_open_any_when_another_count_is_given_then_it_is_refused(kind: str, tmp_path: Path) -> None:
    path = Fork().write(tmp_path / "iter")
    if kind == "ours":
        path = convert(path, tmp_path / kind, "distopt").path
    _check_refused(
        lambda: open_any(path, resume_step=7), path, "{}", " is 10", " is 7. ", "Drop --resume-step"
    )
    assert {group.step for group in open_any(path, resume_step=10).head.groups} == {10}


def test_open_any_when_ours_gathered_a_group_of_two_dtypes_then_it_is_in_the_order_that_it_says(
    tmp_path: Path,
) -> None:
    fork = Fork(fp32_norms=True)
    folder = fork.write(tmp_path / "iter")
    with changed(folder / "mp_rank_00/distrib_optim.pt") as state:
        state["megatron_distopt"] = {"format": 1, "step": 10}
    assert same(_tensors(open_any(folder)), fork.tensors)


#: By name: how to make a checkpoint, and what is said beside its path when its values are read.
REFUSED_WHEN_READ: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    **{
        f"another model, {layout}": (
            partial(_with_model_of_another_seed, layout),
            (f"{{}}/mp_rank_00/{name}", f"32 of 32 main values of {EMBEDDING!r}", "of one save"),
        )
        for layout, name in MODEL_FILES.items()
    },
    "a name that does not say how a param is cut": (
        _with_unknown_names,
        (
            "'language_model.encoder.layers.0.mlp.up.weight'",
            "tensor-parallel rank 1",
            "tensor-parallel size 1",
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED_WHEN_READ)
def test_read_when_values_cannot_be_the_models_then_it_says_what_and_what_to_do(
    name: str, tmp_path: Path
) -> None:
    make, words = REFUSED_WHEN_READ[name]
    path = make(tmp_path / "checkpoint")
    source = open_any(path)
    _check_refused(lambda: _tensors(source), path, *words)
    _check_refused(lambda: convert(path, tmp_path / "new", "torch"), path, *words)


#: By name: how to make a checkpoint, options of `convert`, and what is said.
NOT_CONVERTED: dict[str, tuple[Callable[[Path], Path], dict[str, Any], tuple[str, ...]]] = {
    **{
        f"no count for {to}": (
            lambda to: Fork(step=None).write(to),
            {"to": to},
            ("{}", "Adam", "--resume-step N", "updates so far (iterations without skipped ones)"),
        )
        for to in ("distopt", "plain")
    },
    "ours of another model": (
        _ours_of_another_model,
        {"to": "plain"},
        ("do not round to the model's params",),
    ),
    "a param too few in the model files": (
        lambda to: _with_model_file(_ours(to), _without_a_param),
        {"to": "plain"},
        ("'language_model.encoder.layers.1.mlp.dense_h_to_4h.bias'", "{}", "of one save"),
    ),
    "an unknown format": (
        lambda to: Fork().write(to),
        {"to": "native"},
        ("'native'", "--to", "distopt, per-rank, gathered, plain, torch"),
    ),
    "no ranks": (
        lambda to: Fork().write(to),
        {"to": "per-rank", "dp": 0},
        ("dp for {} is 0", "at least 1", "Write --dp 8"),
    ),
    "no model files": (
        lambda to: convert(Fork().write(to), to.with_name("state.pt"), "torch").path,
        {"to": "plain"},
        ("{}", "mp_rank_00/model_optim_rng.pt", "Convert to distopt or torch"),
    ),
}


@pytest.mark.parametrize("name", NOT_CONVERTED)
def test_convert_when_it_cannot_become_that_then_it_says_why_and_nothing_is_written(
    name: str, tmp_path: Path
) -> None:
    make, options, words = NOT_CONVERTED[name]
    path = make(tmp_path / "checkpoint")
    _check_refused(lambda: convert(path, tmp_path / "new", **options), path, *words)
    _check_refused(
        lambda: convert(path, path, "plain"),
        path,
        "{}",
        "Name a folder or file that does not exist yet",
    )


@pytest.mark.parametrize("layout", ["per-rank", "gathered"])
def test_convert_when_steps_were_skipped_then_the_count_comes_back(
    layout: str, tmp_path: Path
) -> None:
    start = _write(RUNS["fp16"], "gathered", tmp_path / "start")
    source = open_any(convert(start, tmp_path / "source", "distopt").path)
    ours = convert(start, tmp_path / "ours", "distopt").path
    write_checkpoint(
        ours / "distrib_optim.distopt", replace(source, head=replace(source.head, num_skipped=9))
    )
    there = convert(ours, tmp_path / "there", layout).path
    back = convert(there, tmp_path / "back", "distopt").path
    assert [open_any(path).head.num_skipped for path in (ours, there, back)] == [9, 9, 9]
    write_checkpoint(back / "distrib_optim.distopt", source)
    assert open_any(convert(back, tmp_path / "again", layout).path).head.num_skipped == 0
