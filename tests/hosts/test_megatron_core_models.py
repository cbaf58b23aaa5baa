"""What today's models have, against the host's own distributed optimizer, and resumed at another
layout.

Attention over parts of a sequence needs TransformerEngine, so with context parallelism each rank
attends to its own part alone; what the optimizer has to do with it, gradients averaged over more
ranks, is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.support.cases import Case, Step, train_all
from tests.support.core_version import core_mentions
from tests.support.facts import Facts, facts_of
from tests.support.spawn import run_ranks

HAS_ETP = core_mentions("parallel_state.py", "expert_tensor_parallel_size")
HAS_SHARED = core_mentions(
    "transformer/transformer_config.py", "moe_shared_expert_intermediate_size"
)
HAS_INSTANCES = core_mentions("parallel_state.py", "num_distributed_optimizer_instances")
HAS_MTP = core_mentions("models/gpt/gpt_layer_specs.py", "def get_gpt_mtp_block_spec")
#: See test_megatron_core_parity.py.
MISPLACES_TIED = core_mentions(
    "distributed/param_and_grad_buffer.py",
    "if param_start_index % self.data_parallel_world_size != 0",
)
#: Its torch norms are no function that a test could mark.
MARKS_NORMS = core_mentions("transformer/torch_norm.py", "class WrappedTorchNorm")

_EXPERTS = {"num_experts": 4}
#: Equal layouts one after the other share their process groups, which are slow to make.
_ALL: dict[str, tuple[dict[str, Any], bool]] = {
    "multi-token prediction": ({"dp": 2, "mtp": 1}, HAS_MTP),
    "experts apart": ({"dp": 2, "ep": 2, "shared_experts": HAS_SHARED, **_EXPERTS}, True),
    "experts without tensor parallelism": (
        {"tp": 2, "etp": 1, "ep": 2, **_EXPERTS},
        HAS_ETP and MARKS_NORMS,
    ),
    "tied virtual stages": ({"pp": 2, "vp": 2}, not MISPLACES_TIED),
    "context parallelism": ({"cp": 2}, True),
}
MODELS = {name: shape for name, (shape, is_there) in _ALL.items() if is_there}
#: From which layout to which.
RESUMED = {
    "experts apart": {"dp": 2, **_EXPERTS},
    "experts without tensor parallelism": {"tp": 2, **_EXPERTS},
    "multi-token prediction": {"tp": 2, "mtp": 1},
}
RESUMED = {
    name: to
    for name, to in RESUMED.items()
    if name in MODELS and (to.get("tp", 1) == 1 or MARKS_NORMS)
}
# 0.12 has other gradients of these layers under tensor parallelism, with its own optimizer as well
if MISPLACES_TIED:
    RESUMED.pop("multi-token prediction", None)
#: Of losses of 4.6 to 4.9, and relative of norms: what separates the host's own two optimizers, and
#: sums of more ranks.
NEAR = 1e-6


#: Of each training, and before which of them it is saved: what it saves is told by the losses of
#: the two after it.
STEPS, SAVED_BEFORE = 3, 1
OPTIMIZERS: tuple[Literal["distopt", "host-distributed"], ...] = ("distopt", "host-distributed")
Curves = dict[tuple[str, str], list[Step]]  # by model and optimizer


def collect_facts(rank: int, size: int, folder: Path) -> Mapping[str, Any]:
    curves: Curves = {
        (name, optimizer): _train(name, optimizer, folder)
        for name in MODELS
        for optimizer in OPTIMIZERS
    }
    taken_over = _taken_over(folder / "context")
    resumed = {name: _resume(name, folder) for name in RESUMED}
    return {"curves": curves, "resumed": resumed, "taken over": taken_over}


def _train(name: str, optimizer: Any, folder: Path) -> list[Step]:
    """Ours is saved on the way."""
    from tests.support import gpt

    steps = []
    with contextlib.closing(gpt.Training(Case(optimizer, **MODELS[name]))) as training:
        for number in range(STEPS):
            if number == SAVED_BEFORE and optimizer == "distopt":
                training.optimizer.save(_folder_of(name, folder))
            steps.append(training.step())
    return steps


def _folder_of(name: str, folder: Path) -> Path:
    return folder / name.replace(" ", "_")


def _taken_over(folder: Path) -> bool:
    """Whether data-parallel ranks take the params that context-parallel ones saved."""
    from tests.support import gpt

    with contextlib.closing(gpt.Training(Case("distopt", cp=2, precision="bf16"))) as training:
        training.step()
        training.optimizer.save(folder)
        params = training.params()
    with contextlib.closing(gpt.Training(Case("distopt", dp=2, precision="bf16"))) as training:
        training.optimizer.load(folder)
        return all(torch.equal(tensor, params[name]) for name, tensor in training.params().items())


def _resume(name: str, folder: Path) -> list[float]:
    """Losses of the steps after the save, at another layout."""
    from tests.support import gpt

    layout = _one_layout(MODELS[name], RESUMED[name])
    with contextlib.closing(
        gpt.Training(Case("distopt", **{**MODELS[name], **layout}))
    ) as training:
        training.steps_taken = SAVED_BEFORE
        training.optimizer.load(_folder_of(name, folder))
        return [training.step().loss for _ in range(SAVED_BEFORE, STEPS)]


def _one_layout(before: Mapping[str, Any], to: Mapping[str, Any]) -> dict[str, Any]:
    """With the samples of a step as before: more microbatches where there are fewer data-parallel
    ranks."""
    fresh = {"dp": 1, "tp": 1, "ep": 1, "etp": None, **to}
    return {**fresh, "num_microbatches": 2 * before.get("dp", 1) // fresh["dp"]}


facts = facts_of(collect_facts, 2, seconds=400.0, core=True)


@pytest.mark.parametrize("name", _ALL)
def test_curve_when_the_model_is_of_today_then_it_is_the_hosts(
    facts: Facts, name: str, record_property: Any
) -> None:
    if name not in MODELS:
        pytest.skip(f"this megatron-core has no {name}, or cannot run it on a CPU")
    ours, theirs = (facts.first["curves"][name, optimizer] for optimizer in OPTIMIZERS)
    loss, norm = _distance(ours, theirs)
    record_property("deviation", {"what": f"fp32 {name}", "loss": loss, "grad_norm": norm})
    assert loss <= NEAR
    assert norm <= NEAR


def _distance(ours: Sequence[Step], theirs: Sequence[Step]) -> tuple[float, float]:
    pairs = list(zip(ours, theirs, strict=True))
    norms = [(one.grad_norm or 0.0, other.grad_norm or 0.0) for one, other in pairs]
    return max(abs(one.loss - other.loss) for one, other in pairs), max(
        abs(a - b) / b for a, b in norms
    )


@pytest.mark.parametrize("name", RESUMED)
def test_checkpoint_when_loaded_at_another_layout_of_experts_then_the_run_goes_on(
    facts: Facts, name: str
) -> None:
    rest = [step.loss for step in facts.first["curves"][name, "distopt"][SAVED_BEFORE:]]
    assert facts.first["resumed"][name] == pytest.approx(rest, abs=NEAR)


def test_checkpoint_when_written_with_context_parallelism_then_data_parallel_ranks_take_it(
    facts: Facts,
) -> None:
    assert facts["taken over"] == [True] * 2


INSTANCES = {
    "two instances": Case("distopt", dp=4, instances=2, steps=4),
    "two instances of experts": Case("distopt", dp=4, ep=2, instances=2, steps=4, num_experts=4),
}
if core_mentions("distributed/distributed_data_parallel.py", "Partial DistOpt cannot support MoE"):
    del INSTANCES["two instances of experts"]


def collect_instances(rank: int, size: int, folder: str) -> Mapping[str, Any]:
    from tests.support import gpt

    curves = {
        optimizer: train_all(
            rank, size, {name: case.of(optimizer=optimizer) for name, case in INSTANCES.items()}
        )
        for optimizer in OPTIMIZERS
    }
    with contextlib.closing(gpt.Training(INSTANCES["two instances"])) as training:
        training.step()
        training.optimizer.save(Path(folder))
        rest = training.step().loss
    with contextlib.closing(gpt.Training(Case("distopt", dp=4))) as training:
        training.steps_taken = 1
        training.optimizer.load(Path(folder))
        return {"curves": curves, "resumed": (rest, training.step().loss)}


@pytest.mark.long
@pytest.mark.skipif(
    not HAS_INSTANCES, reason="this megatron-core has one instance of its distributed optimizer"
)
def test_curve_when_there_are_two_instances_then_it_is_the_hosts_and_one_goes_on(
    tmp_path: Path,
) -> None:
    found = run_ranks(collect_instances, 4, str(tmp_path), seconds=200.0, core=True)[0]
    for name in INSTANCES:
        loss, norm = _distance(
            *(found["curves"][optimizer][name].steps for optimizer in OPTIMIZERS)
        )
        assert loss <= NEAR, name
        assert norm <= NEAR, name
    assert found["resumed"][1] == pytest.approx(found["resumed"][0], abs=NEAR)
