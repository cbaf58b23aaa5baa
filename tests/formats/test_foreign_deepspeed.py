"""DeepSpeed's universal checkpoints, read offline: every tensor is the live one to the bit.

One spawn trains a model of odd shapes on two ranks; rank 0 then runs DeepSpeed's own tool on what
was saved.
"""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import open_any
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_says, refused

pytestmark = pytest.mark.long

STEPS = 3
CONFIG = {
    "zero_optimization": {"stage": 1, "contiguous_gradients": True},
    "bf16": {"enabled": True},
}
UNIVERSAL = "universal"


def save_all(rank: int, size: int, folder: Path) -> dict[str, Tensor]:
    import os

    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(size))
    from deepspeed.checkpoint import ds_to_universal

    # By import_module, because `deepspeed.comm.torch` as an attribute is torch itself.
    # compiles for minutes
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    state = train(CONFIG, folder / "zero")
    if rank == 0:
        step, target = folder / "zero" / f"global_step{STEPS}", folder / UNIVERSAL / "step"
        with pytest.MonkeyPatch.context() as patch:
            options = [
                "--num_extract_workers",
                "1",
                "--num_merge_workers",
                "1",
                "--inject_missing_state",
            ]
            patch.setattr(
                "sys.argv",
                ["", "--input_folder", str(step), "--output_folder", str(target), *options],
            )
            ds_to_universal.main(ds_to_universal.parse_arguments())
    return state


def train(config: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Saves after some steps; the elements that this rank owns, by key, 1-D."""
    import deepspeed
    import torch.distributed as dist

    torch.manual_seed(0)
    groups = groups_of(model := make_model())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config={
            **config,
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
        },
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
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 2, bias=False)
    )


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Of 49 and 21 elements: neither can be halved without padding."""
    weights, others = (
        [p for p in model.parameters() if (p.dim() > 1) == is_weight] for is_weight in (True, False)
    )
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def owned(optimizer: Any, params: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, param in params.items():
        for kept in (
            (optimizer.optimizer.state[param._hp_mapping.hp_fragment._base],)
            if param._hp_mapping
            else ()
        ):
            at = param._hp_mapping.get_hp_fragment_address()
            tensors = {"main": param._hp_mapping.hp_fragment._base, **kept}
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                found[f"{kind}/{name}"] = (
                    tensors[kind].detach()[at.start : at.start + at.numel].clone()
                )
    return found


facts = facts_of(save_all, 2)


@pytest.fixture(scope="module")
def live(facts: Facts) -> dict[str, Tensor]:
    """Whole tensors by key."""
    ranks = facts.by_rank
    return {
        key: torch.cat([rank[key] for rank in ranks if key in rank]).view(param.shape)
        for name, param in make_model().named_parameters()
        for key in (f"main/{name}", f"exp_avg/{name}", f"exp_avg_sq/{name}")
    }


def check(source: Source, state: dict[str, Tensor]) -> None:
    assert source.tensors.keys() == state.keys() and len(state) == 15
    for key, tensor in state.items():
        found = source.read(key)
        assert source.tensors[key].shape == tuple(found.shape)
        assert torch.equal(found, tensor), key


def test_open_when_deepspeed_made_it_universal_then_every_tensor_is_the_live_one(
    facts: Facts, live: dict[str, Tensor]
) -> None:
    for path in (facts.folder / UNIVERSAL, facts.folder / UNIVERSAL / "step"):
        source = open_any(path)
        check(source, live)
        groups = source.head.groups
        assert [set(group.names) for group in groups] == [
            {"0.weight", "2.weight"},
            {"0.bias", "1.weight", "1.bias"},
        ]
        assert [group.options["weight_decay"] for group in groups] == [0.1, 0.0]
        assert [group.options["betas"] for group in groups] == [[0.9, 0.999]] * 2
        assert {group.step for group in groups} == {STEPS}
        assert source.head.inner == "adam" and source.head.about["host"] == "deepspeed"
        assert source.head.loss_scale == {} and source.head.num_skipped == 0


def test_open_when_deepspeed_saved_and_nobody_put_it_together_then_refused_with_its_tool(
    facts: Facts, live: dict[str, Tensor]
) -> None:
    step = facts.folder / "zero" / f"global_step{STEPS}"
    for path in (facts.folder / "zero", step):
        with pytest.raises(CheckpointError, match=f"ds_to_universal --input_folder {step} "):
            open_any(path)


def test_open_when_a_universal_checkpoint_says_no_groups_then_it_is_refused(
    facts: Facts, live: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "step"
    shutil.copytree(facts.folder / UNIVERSAL / "step", path)
    (path / "mp_rank_00_model_states.pt").unlink()
    assert_says(
        refused(CheckpointError, lambda: open_any(path)),
        f"{path}: 2 param groups, but names of 0 in mp_rank_XX_model_states.pt. "
        "Run python -m deepspeed.checkpoint.ds_to_universal again.",
    )


def test_loss_scale_when_deepspeed_counts_from_the_last_overflow_then_ours_counts_good_steps(
    facts: Facts, live: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "step"
    shutil.copytree(facts.folder / UNIVERSAL / "step", path)
    # written by this test
    state = torch.load(path / "zero" / "optimizer_state.pt", weights_only=False)
    scaler = import_module("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(
        init_scale=1024, scale_window=10, delayed_shift=2, min_scale=1, consecutive_hysteresis=False
    )
    scaler.cur_iter, scaler.last_overflow_iter = 17, 3
    torch.save({**state, "loss_scaler": scaler}, path / "zero" / "optimizer_state.pt")
    assert open_any(path).head.loss_scale == {"scale": 1024.0, "good_steps": 3.0, "tolerated": 2.0}
