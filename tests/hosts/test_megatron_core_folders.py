"""`save(folder)` and `load(folder)` on every version of megatron-core, at other layouts; what a
version cannot take.

tests/hosts/test_megatron_core_checkpoints.py goes much further, on the versions whose
`dist_checkpointing` takes ours.

Exercises session/host_state.py, session/on_all_ranks.py, session/run_session.py,
hosts/megatron_core/checkpoint.py.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.checkpoint.protect.protection import Protection
from megatron_distopt.errors import CheckpointError
from tests.support.cases import Case
from tests.support.core_version import core_mentions
from tests.support.exact_core import variables
from tests.support.facts import Facts, facts_of, outcomes
from tests.support.refusals import assert_mentions

DP2 = Case("distopt", dp=2, steps=2)
SAVED = {
    "fp32": DP2,
    "fp16": DP2.of(precision="fp16", initial_loss_scale=1024.0),
    "low": DP2.of(precision="bf16"),  # goes on at the other layout with state in fp32
}
#: By name of what is saved, variables of ours.
OPTIONS = {
    "low": {"MAIN_PARAMS_DTYPE": "remainder", "EXP_AVG_DTYPE": "int8", "EXP_AVG_SQ_DTYPE": "int8"}
}
#: The global batch is the same.
TP2 = {"dp": 1, "tp": 2, "num_microbatches": 4}
#: What a start loads from disk before it looks into memory, and variables of ours.
STARTS: dict[str, tuple[str | None, dict[str, str]]] = {
    "nothing": (None, {}),
    "the newest": ("disk-2", {}),
    "an older one": ("disk-1", {}),
    "an older one, and memory is wanted": ("disk-1", {"PROTECT_TAKE": "3"}),
}
#: After the save.
MORE_STEPS = 2
#: Of losses of 4 at another layout: sums of parts in 16 bits, and state that is rounded.
NEAR = 5e-3
#: Until 0.14 the host wants shards on a regular grid.
TAKES_BOXES = core_mentions(
    "dist_checkpointing/mapping.py", "if self.axis_fragmentations is not None:"
)


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"sharded": _sharded(), "script": [_start(**args) for args in SCRIPTS]}
    found |= outcomes({"nan": _leave_out_nan})
    found["memory"] = _beside_a_disk(folder)
    wholes = {}
    for name, case in SAVED.items():
        with variables(OPTIONS.get(name, {})):
            wholes[name] = params, losses = _save(case, folder / name)
            again = _resume(case, folder / name, params)
        found[name] = {"losses": losses, "dp2": again}
    for name, (params, _) in wholes.items():
        found[name]["tp2"] = _resume(SAVED[name].of(**TP2), folder / name, params)
    return found


def _save(case: Case, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The params when it is saved, and the losses afterwards."""
    from tests.support.gpt import Training

    training = Training(case)
    for _ in range(case.steps):
        training.step()
    training.optimizer.save(folder)
    saved, losses = training.params(), [training.step().loss for _ in range(MORE_STEPS)]
    training.close()
    return saved, losses


def _resume(case: Case, folder: Path, saved: dict[str, Tensor]) -> dict[str, Any]:
    from tests.support.gpt import Training

    resumed = Training(case)
    resumed.optimizer.load(folder)
    resumed.steps_taken = case.steps
    # Those that tensor parallelism does not cut; the losses tell of the others.
    whole = {
        key: value for key, value in resumed.params().items() if value.shape == saved[key].shape
    }
    same = all(torch.equal(value, saved[key]) for key, value in whole.items())
    losses = [resumed.step().loss for _ in range(MORE_STEPS)]
    resumed.close()
    return {"params": same, "losses": losses}


def _sharded() -> str:
    from tests.support.gpt import Training

    training = Training(DP2)
    try:
        training.optimizer.sharded_state_dict({})
    except CheckpointError as error:
        return str(error)
    finally:
        training.close()
    return "taken"


#: Arguments of Megatron-LM's training script; those of the first ask for what a host with a grid
#: cannot save.
SCRIPTS: tuple[dict[str, Any], ...] = (
    {"save": "folder", "ckpt_format": "torch_dist"},
    {"save": "folder", "ckpt_format": "torch"},
    {"save": "folder", "ckpt_format": "torch_dist", "no_save_optim": True},
    {"save": None, "ckpt_format": "torch_dist"},
)


@contextlib.contextmanager
def _script(**args: Any) -> Iterator[None]:
    """In the block the process has a training script with these arguments."""
    name = "megatron.training.global_vars"
    sys.modules[name] = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**args))  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _start(**args: Any) -> str:
    from tests.support.gpt import Training

    try:
        with _script(**args):
            Training(DP2).close()
    except CheckpointError as error:
        return str(error)
    return "built"


def _leave_out_nan() -> None:
    """slime and miles measure by themselves where they were told not to check, and then make the
    step or not."""
    from tests.support.gpt import Training

    with (
        _script(check_for_nan_in_loss_and_grad=False),
        contextlib.closing(Training(DP2)) as training,
    ):
        training.step()
        before = training.params()
        training.forward_backward()
        next(training.named_params())[1].main_grad.fill_(math.nan)
        assert training.optimizer.prepare_grads()
        assert training.optimizer.step() == (False, None, None)
        assert all(torch.equal(param, before[name]) for name, param in training.params().items())
        assert training.step().success


def _beside_a_disk(folder: Path) -> dict[str, Any]:
    """A loop of one's own that dies after step 3, with checkpoints of steps 1 and 2: by what a
    start loads before `resume`, the step from which it goes on and its next loss, or the error."""
    from tests.support.gpt import Training

    def protected(memory: Path, **more: str) -> contextlib.AbstractContextManager[object]:
        return variables({"PROTECT_EVERY": "1", "PROTECT_FOLDER": str(memory), **more})

    border = Protection.border

    def patient(self: Protection, step: int, state: Any) -> None:
        border(self, step, state)
        self.finish()

    with mock.patch.object(Protection, "border", patient), protected(folder / "memory"):
        training = Training(DP2)
        assert training.optimizer.resume() is None, "nothing is there"
        for step in (1, 2, 3):
            training.step()
            training.optimizer.protect(step, lambda step=step: step)
            if step < 3:
                training.optimizer.save(folder / f"disk-{step}")
        next_loss = training.step().loss
    found: dict[str, Any] = {"next loss": next_loss}
    for name, (disk, more) in STARTS.items():
        memory = folder / f"memory of {name}"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(folder / "memory", memory)
        dist.barrier()
        with protected(memory, **more):
            again = Training(DP2)
            if disk is not None:
                again.optimizer.load(folder / disk)
            try:
                resumed = again.optimizer.resume()
            except CheckpointError as error:
                found[name] = str(error)
                continue
            assert resumed is not None and resumed.state == resumed.step, "as it was given"
            again.steps_taken = resumed.step
            found[name] = resumed.step, again.step().loss
    return found


facts = facts_of(collect_facts, 2, seconds=240, core=True)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.parametrize("name", SAVED)
def test_folder_when_loaded_at_another_layout_then_the_run_goes_on(
    facts: Facts, name: str, layout: str
) -> None:
    for found in facts[name]:
        again = found[layout]
        assert again["params"]
        assert again["losses"] == pytest.approx(
            found["losses"], abs=0.0 if layout == "dp2" else NEAR
        )


def test_step_when_the_script_was_told_not_to_check_for_nan_then_it_is_left_out(
    facts: Facts,
) -> None:
    facts.assert_passed("nan")


def test_sharded_state_when_the_host_wants_a_grid_then_refused_with_the_way_out(
    facts: Facts,
) -> None:
    for text in facts["sharded"]:
        if TAKES_BOXES:
            assert text == "taken"
        else:
            assert "regular grid" in text
            assert "save(folder)" in text


def test_start_when_the_script_will_save_what_the_host_cannot_take_then_refused_before_training(
    facts: Facts,
) -> None:
    for first, *others in facts["script"]:
        assert others == ["built"] * 3
        if TAKES_BOXES:
            assert first == "built"
        else:
            assert "--ckpt-format torch" in first


@pytest.mark.parametrize("start", STARTS)
def test_memory_when_a_loop_of_ones_own_loads_an_older_checkpoint_then_refused_with_both_ways_on(
    facts: Facts, start: str
) -> None:
    for memory in facts["memory"]:
        if start == "an older one":
            assert_mentions(memory[start], "PROTECT_TAKE=3", "remove", "memory of an older one")
        else:
            assert memory[start] == (3, memory["next loss"])
