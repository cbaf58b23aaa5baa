"""DeepSpeed's checkpoints, written by it on two ranks, read offline: every tensor is the live one to the bit.

One spawn trains a model of odd shapes with each of DeepSpeed's optimizers; rank 0 then runs DeepSpeed's own tools on
what was saved. The files of other layouts are made from those by hand.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats.deepspeed import universal, zero
from megatron_distopt.formats.deepspeed.state import loss_scale_of
from megatron_distopt.formats.pickles import Inert
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.long

STEPS = 3
ZERO = {"stage": 1, "contiguous_gradients": True}
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_optimization": ZERO, "bf16": {"enabled": True}},
    "stage 2": {  # with params dealt out to the ranks in turn
        "zero_optimization": {**ZERO, "stage": 2, "round_robin_gradients": True},
        "bf16": {"enabled": True},
    },
    "BF16_Optimizer": {
        "zero_optimization": ZERO,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp32": {"zero_optimization": {**ZERO, "elastic_checkpoint": True}},  # without padding, and without options
}
ELASTIC = ("fp32",)
#: DeepSpeed's own tool cannot read the first, and gives params of the second other names.
NOT_READ_BY_DEEPSPEED = ("BF16_Optimizer", "stage 2")
UNIVERSAL = "universal"


@dataclass(frozen=True)
class Live:
    """What DeepSpeed had on a rank and what its tools read, by case.

    Args:
        state: elements that the rank owns, by key, as of a `Source`.
        fp32: by name, as its tool for fp32 weights gives them.
    """

    state: dict[str, dict[str, Tensor]]
    fp32: dict[str, dict[str, Tensor]]


def save_all(rank: int, size: int, folder: Path) -> Live:
    import os

    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(size))
    import deepspeed.comm.torch as communication
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    communication.build_shm_op = lambda: None  # it would compile an extension for a minute
    state = {name: train(config, folder / name) for name, config in CASES.items()}
    fp32 = {
        name: dict(get_fp32_state_dict_from_zero_checkpoint(str(folder / name)))
        for name in (CASES if rank == 0 else ())
        if name not in NOT_READ_BY_DEEPSPEED
    }
    if rank == 0:
        step, target = folder / "stage 1" / f"global_step{STEPS}", folder / UNIVERSAL / "step"
        with pytest.MonkeyPatch.context() as patch:
            options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
            patch.setattr("sys.argv", ["", "--input_folder", str(step), "--output_folder", str(target), *options])
            ds_to_universal.main(ds_to_universal.parse_arguments())
    return Live(state, fp32)


def train(config: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Saves after some steps; the elements that this rank owns, by key, 1-D."""
    import deepspeed
    import torch.distributed as dist

    torch.manual_seed(0)
    groups = groups_of(model := make_model())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config={**config, "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True},
        dist_init_required=False,
    )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        batch = torch.randn(2, 5, generator=generator).to(next(model.parameters()).dtype)
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()
    engine.save_checkpoint(str(folder))
    return owned(engine.optimizer, dict(model.named_parameters()))


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 2, bias=False))


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Of 49 and 21 elements: neither can be halved without padding."""
    weights, others = ([p for p in model.parameters() if (p.dim() > 1) == is_weight] for is_weight in (True, False))
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def owned(optimizer: Any, params: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, param in params.items():
        for kept in (optimizer.optimizer.state[param._hp_mapping.hp_fragment._base],) if param._hp_mapping else ():
            at = param._hp_mapping.get_hp_fragment_address()
            tensors = {"main": param._hp_mapping.hp_fragment._base, **kept}
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                found[f"{kind}/{name}"] = tensors[kind].detach()[at.start : at.start + at.numel].clone()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def live(folder: Path) -> Live:
    """Of whole tensors."""
    ranks = run_ranks(save_all, 2, folder)
    shapes = {name: param.shape for name, param in make_model().named_parameters()}
    whole = {
        case: {
            key: torch.cat([rank.state[case][key] for rank in ranks if key in rank.state[case]]).view(shapes[name])
            for name in shapes
            for key in (f"main/{name}", f"exp_avg/{name}", f"exp_avg_sq/{name}")
        }
        for case in CASES
    }
    return Live(whole, ranks[0].fp32)


WEIGHTS = {"0.weight", "2.weight"}
ALL = WEIGHTS | {"0.bias", "1.weight", "1.bias"}


def step_folder(folder: Path, case: str) -> Path:
    return folder / case / f"global_step{STEPS}"


def check(source: Source, state: dict[str, Tensor]) -> None:
    assert source.tensors.keys() == state.keys() and len(state) == 15
    for key, tensor in state.items():
        found = source.read(key)
        assert source.tensors[key].shape == tuple(found.shape)
        assert torch.equal(found, tensor), key


@pytest.mark.parametrize("case", CASES)
def test_open_when_deepspeed_saved_then_every_tensor_is_the_live_one(folder: Path, live: Live, case: str) -> None:
    for path in (folder / case, step_folder(folder, case)):
        assert zero.recognises(path) and not universal.recognises(path)
        source = zero.open_deepspeed_zero(path)
        check(source, live.state[case])
        names = [set(group.names) for group in source.head.groups]
        assert names == ([ALL] if case in ELASTIC else [WEIGHTS, ALL - WEIGHTS])
        assert {group.step for group in source.head.groups} == {STEPS}
        assert source.head.inner == "adam" and source.head.about["host"] == "deepspeed"
        assert source.head.loss_scale == {} and source.head.num_skipped == 0


def test_open_when_options_are_saved_then_they_are_those_of_each_group(folder: Path, live: Live) -> None:
    groups = zero.open_deepspeed_zero(folder / "stage 1").head.groups
    assert [group.options["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group.options["betas"] for group in groups] == [[0.9, 0.999]] * 2


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_READ_BY_DEEPSPEED])
def test_read_when_deepspeeds_tool_reads_the_weights_then_they_are_the_same(
    folder: Path, live: Live, case: str
) -> None:
    source = zero.open_deepspeed_zero(folder / case)
    assert len(live.fp32[case]) == 5
    assert all(torch.equal(source.read(f"main/{name}"), tensor) for name, tensor in live.fp32[case].items())


def test_open_when_deepspeed_made_it_universal_then_every_tensor_is_the_live_one(folder: Path, live: Live) -> None:
    for path in (folder / UNIVERSAL, folder / UNIVERSAL / "step"):
        assert universal.recognises(path) and not zero.recognises(path)
        source = universal.open_deepspeed_universal(path)
        check(source, live.state["stage 1"])
        assert source.head.groups == zero.open_deepspeed_zero(folder / "stage 1").head.groups


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A copy of a folder with changed content of its files.

    Args:
        source, target: folders.
        change: takes the name of a file and its content.
    """
    target.mkdir()
    for path in source.iterdir():
        # Written by DeepSpeed in this test; the objects in it are its own.
        content = torch.load(path, weights_only=False)
        change(path.name, content)
        torch.save(content, target / path.name)
    return target


def test_open_when_the_files_do_not_say_where_params_are_then_they_follow_one_another(
    folder: Path, live: Live, tmp_path: Path
) -> None:
    def change(name: str, content: Any) -> None:
        content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)

    source = zero.open_deepspeed_zero(rewritten(step_folder(folder, "stage 1"), tmp_path / "old", change))
    check(source, live.state["stage 1"])


def test_open_when_params_were_dealt_out_and_nobody_says_where_then_it_is_refused(
    folder: Path, live: Live, tmp_path: Path
) -> None:
    def change(name: str, content: Any) -> None:
        content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)

    path = rewritten(step_folder(folder, "stage 2"), tmp_path / "old", change)
    assert_says(
        refused(path),
        f"Invalid checkpoint {path}: round_robin_gradients without param_slice_mappings. "
        "Must say where params are, or have them one after the other. "
        "Save it without round_robin_gradients.",
    )


def tensor_parallel(folder: Path, target: Path, info: dict[str, Any] | None) -> Path:
    """The same files as those of two tensor-parallel ranks, with the same slices."""
    target.mkdir()
    for path in folder.iterdir():
        content = torch.load(path, weights_only=False)
        if "param_shapes" in content:
            content["checkpoint_parallel_dimensions"] = {"tp_degree": 2, "pp_degree": 1}
            content.update({} if info is None else {"universal_checkpoint_info": info})
        for rank in (0, 1):
            torch.save(content, target / path.name.replace("mp_rank_00", f"mp_rank_{rank:02d}"))
    return target


PATTERNS = {
    "tp_replicated_parameter_patterns": [r"1\..*"],
    "parameter_with_row_parallelism_patterns": ["2.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [],
    "vocabulary_parameter_patterns": [],
}


def test_open_when_params_are_cut_then_patterns_put_them_together(folder: Path, live: Live, tmp_path: Path) -> None:
    path = tensor_parallel(step_folder(folder, "stage 1"), tmp_path / "tp", PATTERNS)
    source, state = zero.open_deepspeed_zero(path), live.state["stage 1"]
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1), ("1.weight", None), ("1.bias", None)):
            part = state[f"{kind}/{name}"]
            whole = part if dim is None else torch.cat([part, part], dim)
            assert torch.equal(source.read(f"{kind}/{name}"), whole)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        zero.open_deepspeed_zero(path)
    return str(error.value)


def command(path: Path) -> str:
    tool = f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {path} --output_folder UNIVERSAL"
    return f"Run {tool}, and give UNIVERSAL."


def test_open_when_nobody_says_how_params_are_cut_then_it_is_refused(folder: Path, live: Live, tmp_path: Path) -> None:
    path = tensor_parallel(step_folder(folder, "stage 1"), tmp_path / "tp", None)
    assert_says(
        refused(path),
        f"Invalid checkpoint {path}: 2 tensor-parallel slices. Must say how params are cut, in an entry "
        "universal_checkpoint_info of mp_rank_XX_model_states.pt. "
        "Load it with tensor-parallel size 1 where it was trained, and save it again.",
    )


@pytest.mark.parametrize(
    "key, entry",
    [
        ("parameter_to_average_patterns", ["0.bias"]),
        ("parameter_with_sub_params", [{"patterns": ["0.bias"], "shape": [3, -1], "partition_dim": 0}]),
        ("affine_map", {"version": 1, "params": {"0.bias": {}}}),
    ],
)
def test_open_when_slices_are_no_parts_of_one_dimension_then_it_is_refused(
    folder: Path, live: Live, tmp_path: Path, key: str, entry: Any
) -> None:
    path = tensor_parallel(step_folder(folder, "stage 1"), tmp_path / "tp", {**PATTERNS, key: entry})
    assert_says(
        refused(path),
        f"Invalid checkpoint {path}: '0.bias', which is among {key}. "
        f"Must have slices that are parts of one dimension. {command(path)}",
    )


def test_open_when_it_is_of_stage_3_then_it_is_refused(folder: Path, live: Live, tmp_path: Path) -> None:
    def change(name: str, content: Any) -> None:
        if "optimizer_state_dict" in content:
            content["optimizer_state_dict"]["zero_stage"] = 3

    path = rewritten(step_folder(folder, "stage 1"), tmp_path / "stage3", change)
    assert_says(refused(path), f"Invalid checkpoint {path}: ZeRO stage 3. Must be of stage 1 or 2. {command(path)}")


def test_open_when_experts_have_other_ranks_then_it_is_refused(folder: Path, live: Live, tmp_path: Path) -> None:
    def change(name: str, content: Any) -> None:
        if "optimizer_state_dict" in content:
            content["optimizer_state_dict"]["partition_count"] = [2, 1]

    path = rewritten(step_folder(folder, "stage 1"), tmp_path / "experts", change)
    assert_says(
        refused(path),
        f"Invalid checkpoint {path}: param groups over [1, 2] ranks. Must have all param groups over the same ranks. "
        "Convert a model without experts; DeepSpeed alone reads these.",
    )


@pytest.mark.parametrize(
    "gone, got",
    [
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "optimizer files of ranks [0]"),
        ("mp_rank_00_model_states.pt", "optimizer files of model-parallel ranks [0] and model files of []"),
    ],
)
def test_open_when_a_file_is_missing_then_that_is_said(
    folder: Path, live: Live, tmp_path: Path, gone: str, got: str
) -> None:
    path = tmp_path / "step"
    shutil.copytree(step_folder(folder, "stage 1"), path)
    (path / gone).unlink()
    rule = "hold those of all 2 data-parallel ranks" if "optim" in gone else "hold both of every rank"
    remedy = "Copy the files of all ranks into the folder."
    assert_says(refused(path), f"Invalid checkpoint {path}: {got}. Must {rule}. {remedy}")


def test_open_when_a_universal_checkpoint_says_no_groups_then_it_is_refused(
    folder: Path, live: Live, tmp_path: Path
) -> None:
    path = tmp_path / "step"
    shutil.copytree(folder / UNIVERSAL / "step", path)
    (path / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError) as error:
        universal.open_deepspeed_universal(path)
    assert_says(
        str(error.value),
        f"Invalid checkpoint {path}: 2 param groups, and names of params of 0. Must say in mp_rank_XX_model_states.pt "
        "which params are in which of them. Run python -m deepspeed.checkpoint.ds_to_universal again.",
    )


def test_loss_scale_when_deepspeed_counts_from_the_last_overflow_then_ours_counts_good_steps() -> None:
    scaler = Inert()
    scaler.__setstate__(
        {
            "dynamic": True,
            "cur_scale": 1024.0,
            "cur_iter": 17,
            "last_overflow_iter": 3,
            "scale_window": 10,
            "cur_hysteresis": 2,
        }
    )
    assert loss_scale_of(scaler) == {"scale": 1024.0, "good_steps": 3.0, "tolerated": 2.0}
