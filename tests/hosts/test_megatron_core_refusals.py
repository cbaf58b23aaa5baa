"""What the megatron-core host refuses on all ranks and before training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_distopt import DistOptConfig
from megatron_distopt.errors import (
    CheckpointError,
    ConfigError,
    DistOptError,
    HostError,
    LayoutError,
    RanksDisagreeError,
)
from tests.support.refusals import assert_mentions
from tests.support.spawn import run_ranks

SIZE = 2
Refusal = tuple[type[DistOptError], str]


def run_all(rank: int, size: int) -> dict[str, Refusal | None]:
    return {name: _refusal(lambda make=make: make(rank)) for name, make in _cases().items()}  # type: ignore[misc]


def _refusal(make: Callable[[], object]) -> Refusal | None:
    try:
        make()
    except DistOptError as error:
        return type(error), str(error)
    return None


def _cases() -> dict[str, Callable[[int], object]]:
    """In this order: the first one runs before there is a parallel_state."""
    return {
        "no parallel_state": _without_parallel_state,
        "ddp without the flag": lambda rank: _build(ddp={"use_distributed_optimizer": False}),
        "no ddp": lambda rank: _build(unwrapped=True),
        "unfrozen after wrapping": lambda rank: _build(frozen_when_wrapped=True),
        "float64": lambda rank: _build(double=True),
        "fp16 params without fp16": lambda rank: _build(half=True),
        "unknown precision": lambda rank: _build(
            optimizer={
                "use_precision_aware_optimizer": True,
                "main_params_dtype": torch.float32,
                "exp_avg_dtype": torch.float64,
                "exp_avg_sq_dtype": torch.float32,
            }
        ),
        "cuda graph": lambda rank: _build(optimizer={"optimizer_cuda_graph": True}),
        "fp4 gather": lambda rank: _build(ddp_later={"fp4_param_gather": True}),
        "custom fsdp": lambda rank: _build(ddp_later={"use_custom_fsdp": True}),
        "generalized tensor parallelism": lambda rank: _build(tag="is_gtp_weight_remat"),
        "unknown field": lambda rank: _build(newer=5),
        "unknown field, default": lambda rank: _only_part(_build(newer=4)) and None,
        "unknown optimizer": lambda rank: _build(optimizer={"optimizer": "lion"}),
        "absent adam": lambda rank: _build(options=DistOptConfig(adam="apex")),
        "our buckets": lambda rank: _build(options=DistOptConfig(bucket_size=1000)),
        "our clipping": lambda rank: _build(options=DistOptConfig(clip_grad=3.5)),
        "our decay": lambda rank: _build(
            optimizer={"decoupled_weight_decay": False}, options=DistOptConfig(decay="decoupled")
        ),
        "our overlap, off": lambda rank: _build(options=DistOptConfig(overlap_grad_reduce=False)),
        "our shared memory, off": lambda rank: _with_variable("MEGATRON_DISTOPT_SHARED_MEMORY", "no"),
        "one rank only": lambda rank: _build(double=rank == 1),
        "ranks disagree on options": lambda rank: _build(optimizer={"lr": 0.1 if rank == 1 else 0.2}),
        "required and not used": lambda rank: _with_variable(
            "MEGATRON_DISTOPT", "require", optimizer={"use_distributed_optimizer": False}
        ),
        "gathered state": lambda rank: _only_part(_build()).get_parameter_state_dp_zero(),
        "no groups": lambda rank: _build().load_state_dict({"inner": "adam", "param_groups": [], "param_shards": {}}),
        "fewer groups": lambda rank: _build().load_state_dict({"optimizer": {"param_groups": [{}]}}),
        "other ddp options": lambda rank: _build(ddp={"average_in_collective": rank == 1}),
        "other buckets": lambda rank: _build(ddp={"overlap_grad_reduce": True, "bucket_size": 999 if rank == 1 else 1}),
        "bad variable on one rank": lambda rank: _with_variable("MEGATRON_DISTOPT_NONFINITE", "ignore", rank == 1),
        "switched off on one rank": _switched_off,
    }


def _without_parallel_state(rank: int) -> object:
    from megatron.core.optimizer import OptimizerConfig

    import megatron_distopt

    return megatron_distopt.get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [])


def _build(
    *,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    ddp_later: dict[str, Any] | None = None,
    newer: int | None = None,
    tag: str | None = None,
    options: DistOptConfig | None = None,
    unwrapped: bool = False,
    frozen_when_wrapped: bool = False,
    double: bool = False,
    half: bool = False,
) -> Any:
    """`get_megatron_optimizer` on the tests' tiny GPT, with something wrong."""
    from megatron.core.distributed import DistributedDataParallel

    import megatron_distopt
    from tests.support import gpt
    from tests.support.cases import Case

    case = Case("distopt", dp=SIZE)
    gpt.enter_layout(case)
    config = gpt.transformer_config(case)
    model = gpt.build_chunks(case)[0].module
    if double:
        model.double()
    if half:
        model.half()
    first = next(model.parameters())
    first.requires_grad_(not frozen_when_wrapped)
    ddp_config = dataclasses.replace(gpt.ddp_config(case), **(ddp or {}))
    chunk = model if unwrapped else DistributedDataParallel(config, ddp_config, model)
    first.requires_grad_(True)
    if tag is not None:
        setattr(first, tag, True)
    host_config = gpt.optimizer_config(case)
    for name, value in (optimizer or {}).items():
        setattr(host_config, name, value)  # past the checks of the host's own constructor
    for name, value in (ddp_later or {}).items():
        setattr(chunk.ddp_config, name, value)
    if newer is not None:
        host_config.__class__ = _newer_class(type(host_config))
        host_config.new_idea = newer
    return megatron_distopt.get_megatron_optimizer(host_config, [chunk], options=options)


def _newer_class(host_config: type[Any]) -> type[Any]:
    """The host's OptimizerConfig as a later version may have it."""
    return dataclasses.make_dataclass("OptimizerConfig", [("new_idea", int, 4)], bases=(host_config,))


def _only_part(optimizer: Any) -> Any:
    from tests.support.gpt import parts_of

    (part,) = parts_of(optimizer)
    return part


def _with_variable(name: str, value: str, is_set: bool = True, **changes: Any) -> object:
    with mock.patch.dict(os.environ, {name: value} if is_set else {}):
        return _build(**changes)


def _switched_off(rank: int) -> object:
    """Rank 1 runs the host's own factory, whose first exchange finds nobody: rank 0 has raised."""
    from tests.support.gpt import hosts_own_runs

    if rank == 0:
        return _build()
    with hosts_own_runs(), contextlib.suppress(RuntimeError):
        return _with_variable("MEGATRON_DISTOPT", "0")
    return None


EMBEDDING = "embedding.word_embeddings.weight"
FLOAT64 = (LayoutError, f"param '{EMBEDDING}'", "float64", "one of float32, bfloat16, float16", "Convert or freeze")
_OTHERS = "Start rank(s) 1 with the code and options of the others."
_TAKE_ANOTHER = "Load what optimizer.state_dict() returned, or start from the weights with --no-load-optim."
#: The class of each error, and what a user needs of its text.
WANTED: dict[str, tuple[Any, ...]] = {
    "no parallel_state": (
        ConfigError,
        "use_distributed_optimizer",
        "Call parallel_state.initialize_model_parallel(...) before get_megatron_optimizer(...).",
    ),
    "ddp without the flag": (
        ConfigError,
        "without use_distributed_optimizer",
        "Write DistributedDataParallelConfig(use_distributed_optimizer=True).",
    ),
    "our buckets": (ConfigError, "bucket_size", "host's --ddp-bucket-size", "Drop --distopt-bucket-size."),
    "our clipping": (ConfigError, "clip_grad", "3.5 in DistOptConfig(...)", "1.0", "give the host's flag that value."),
    "our decay": (ConfigError, "decay", "'decoupled'", "'l2'", "give the host's flag that value."),
    "our overlap, off": (ConfigError, "host's --overlap-grad-reduce", "Drop --distopt-overlap-grad-reduce."),
    "our shared memory, off": (ConfigError, "host's own collectives", "Drop --distopt-shared-memory."),
    "no ddp": (
        HostError,
        "model chunk",
        "GPTModel",
        "megatron.core.distributed.DistributedDataParallel",
        "Wrap it, or drop the flag.",
    ),
    "unfrozen after wrapping": (
        LayoutError,
        f"param '{EMBEDDING}'",
        "in no buffer",
        "Unfreeze params before wrapping.",
    ),
    "float64": FLOAT64,
    "fp16 params without fp16": (ConfigError, "fp16 params", "loss_scale=None", "--fp16 or --loss-scale 1024."),
    "unknown precision": (
        ConfigError,
        "exp_avg_dtype",
        "float64",
        "one of float32, bfloat16, float16, uint8",
        "Write --exp-avg-dtype fp32.",
    ),
    "cuda graph": (ConfigError, "optimizer_cuda_graph", "Drop --optimizer-cuda-graph."),
    "fp4 gather": (ConfigError, "fp4_param_gather", "Drop --fp4-param-gather."),
    "custom fsdp": (ConfigError, "use_custom_fsdp", "Drop --use-custom-fsdp, or --use-distributed-optimizer."),
    "generalized tensor parallelism": (
        ConfigError,
        f"param '{EMBEDDING}'",
        "Leave generalized tensor parallelism out, or use the host's own optimizer.",
    ),
    "unknown field": (
        ConfigError,
        "new_idea",
        "5 in OptimizerConfig",
        "default",
        "4",
        "Leave new_idea out, or use a megatron_distopt that lists it.",
    ),
    "unknown optimizer": (ConfigError, "optimizer is 'lion'", "one of adam, sgd, muon, module:Class."),
    "absent adam": (ConfigError, "adam 'apex'", "no kernels for cpu", "Install it, or write adam='auto'."),
    "required and not used": (ConfigError, "MEGATRON_DISTOPT=require", "Add --use-distributed-optimizer"),
    "ranks disagree on options": (
        RanksDisagreeError,
        "options: rank 1 has lr=0.1",
        "rank 0 has lr=0.2",
        _OTHERS,
    ),
    "other ddp options": (
        RanksDisagreeError,
        "host options: rank 1 has average_in_collective=True",
        "rank 0 has average_in_collective=False",
        _OTHERS,
    ),
    "other buckets": (
        RanksDisagreeError,
        "host options: rank 1 has bucket_size=999",
        "rank 0 has bucket_size=1",
        _OTHERS,
    ),
    "gathered state": (CheckpointError, "get_parameter_state_dp_zero", "Call save(folder) and load(folder)."),
    "no groups": (
        CheckpointError,
        "optimizer state",
        "inner, param_groups, param_shards",
        "no 'optimizer' with param_groups",
        _TAKE_ANOTHER,
    ),
    "fewer groups": (CheckpointError, "number of param groups", "1", "2", _TAKE_ANOTHER),
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Refusal | None]]:
    return run_ranks(run_all, SIZE)


@pytest.mark.parametrize("name", WANTED)
def test_host_when_input_is_bad_then_every_rank_says_what_to_write(
    found: list[dict[str, Refusal | None]], name: str
) -> None:
    kind, *parts = WANTED[name]
    for refused in (each[name] for each in found):
        assert refused is not None and refused == found[0][name]
        assert refused[0] is kind
        assert_mentions(refused[1], *parts)


def test_host_when_an_unknown_field_has_its_default_then_it_is_served(found: list[dict[str, Refusal | None]]) -> None:
    assert [each["unknown field, default"] for each in found] == [None] * SIZE


#: What rank 1 alone runs into.
OF_RANK_1: dict[str, tuple[Any, ...]] = {
    "one rank only": FLOAT64,
    "bad variable on one rank": (ConfigError, "MEGATRON_DISTOPT_NONFINITE is 'ignore'", "one of raise, skip, log."),
}


@pytest.mark.parametrize("name", OF_RANK_1)
def test_host_when_one_rank_refuses_then_the_other_says_which(
    found: list[dict[str, Refusal | None]], name: str
) -> None:
    kind, *parts = OF_RANK_1[name]
    own, other = found[1][name], found[0][name]
    assert own is not None and own[0] is kind and other is not None and other[0] is RanksDisagreeError
    assert_mentions(own[1], *parts)
    assert_mentions(other[1], "start-up", f"rank 1 refused with «{own[1]}»")


def test_host_when_switched_off_on_one_rank_then_the_other_names_it_and_nothing_hangs(
    found: list[dict[str, Refusal | None]],
) -> None:
    refused = found[0]["switched off on one rank"]
    assert refused is not None and refused[0] is RanksDisagreeError
    assert_mentions(
        refused[1], "not used on rank 1 (MEGATRON_DISTOPT=0)", "all 2 ranks", "the same flags and variables."
    )
