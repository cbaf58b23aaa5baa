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
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_mentions

SIZE = 2
Refusal = tuple[type[DistOptError], str]
Make = Callable[[int], object]  # in a rank


def collect_facts(rank: int, size: int) -> dict[str, Refusal | None]:
    """In the order of the tables: the first case runs before there is a parallel_state."""
    cases = (
        {name: case[0] for name, case in (ON_ALL | ON_RANK_1).items()}
        | SERVED
        | {"switched off": _switched_off}
    )
    return {name: _refusal(lambda make=make: make(rank)) for name, make in cases.items()}  # type: ignore[misc]


def _refusal(make: Callable[[], object]) -> Refusal | None:
    try:
        make()
    except DistOptError as error:
        return type(error), str(error)
    return None


def _without_parallel_state(rank: int) -> object:
    from megatron.core.optimizer import OptimizerConfig

    import megatron_distopt

    return megatron_distopt.get_megatron_optimizer(
        OptimizerConfig(lr=0.1, use_distributed_optimizer=True), []
    )


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
    return dataclasses.make_dataclass(
        "OptimizerConfig", [("new_idea", int, 4)], bases=(host_config,)
    )


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


def _built(**changes: Any) -> Make:
    return lambda rank: _build(**changes)


EMBEDDING = "embedding.word_embeddings.weight"
FLOAT64 = (
    LayoutError,
    f"param '{EMBEDDING}'",
    "float64",
    "one of float32, bfloat16, float16",
    "param.requires_grad_(False)",
)
_TAKE_ANOTHER = (
    "Load what optimizer.state_dict() returned, or start from the weights with --no-load-optim."
)
_AWARE: dict[str, Any] = dict.fromkeys(
    ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.float32
)
_AWARE |= {"use_precision_aware_optimizer": True}
_DOUBLE_MOMENTS = {**_AWARE, "exp_avg_dtype": torch.float64}
_L2 = {"decoupled_weight_decay": False}
_OURS = DistOptConfig
#: What is wrong on all ranks, the class of the error, and what a user needs of its text.
ON_ALL: dict[str, tuple[Any, ...]] = {
    "no parallel_state": (
        _without_parallel_state,
        ConfigError,
        "Call parallel_state.initialize_model_parallel(...)",
    ),
    "ddp without the flag": (
        _built(ddp={"use_distributed_optimizer": False}),
        ConfigError,
        "Write DistributedDataParallelConfig(use_distributed_optimizer=True).",
    ),
    "no ddp": (
        _built(unwrapped=True),
        HostError,
        "GPTModel",
        "Wrap it, or drop --use-distributed-optimizer.",
    ),
    "unfrozen": (
        _built(frozen_when_wrapped=True),
        LayoutError,
        EMBEDDING,
        "param.requires_grad_(True)",
    ),
    "float64": (_built(double=True), *FLOAT64),
    "fp16 params without fp16": (
        _built(half=True),
        ConfigError,
        "fp16 params",
        "--fp16 or --loss-scale 1024.",
    ),
    "unknown precision": (
        _built(optimizer=_DOUBLE_MOMENTS),
        ConfigError,
        "float64",
        "Write --exp-avg-dtype bf16",
        "MEGATRON_DISTOPT_EXP_AVG_DTYPE=int8",
    ),
    "moments in fp8": (
        _built(optimizer={**_AWARE, "exp_avg_dtype": torch.uint8}),
        ConfigError,
        "exp_avg_dtype is fp8",
        "Write --exp-avg-dtype bf16",
    ),
    "main params in fp16": (
        _built(optimizer={**_AWARE, "main_params_dtype": torch.float16}),
        ConfigError,
        "main_params_dtype is float16",
        "Write --main-params-dtype fp32",
    ),
    "cuda graph": (
        _built(optimizer={"optimizer_cuda_graph": True}),
        ConfigError,
        "Drop --optimizer-cuda-graph.",
    ),
    "fp4 gather": (
        _built(ddp_later={"fp4_param_gather": True}),
        ConfigError,
        "Drop --fp4-param-gather.",
    ),
    "generalized tensor parallelism": (
        _built(tag="is_gtp_weight_remat"),
        ConfigError,
        EMBEDDING,
        "Leave generalized",
    ),
    "a norm of its own": (
        _built(tag="grad_norm_group"),
        ConfigError,
        EMBEDDING,
        "Leave mtp_detach_heads out",
    ),
    "unknown field": (
        _built(newer=5),
        ConfigError,
        "new_idea is 5 in",
        "default 4",
        "Leave new_idea out",
    ),
    "unknown optimizer": (
        _built(optimizer={"optimizer": "lion"}),
        ConfigError,
        "'lion'",
        "one of adam, sgd, muon",
    ),
    "our buckets": (
        _built(options=_OURS(bucket_size=9)),
        ConfigError,
        "--ddp-bucket-size",
        "Drop --distopt-bucket",
    ),
    "our 8 bits": (
        _built(options=_OURS(reduce_dtype="bfloat16")),
        ConfigError,
        "reduce_dtype is set, but megatron-core decides it by --grad-reduce-in-bf16",
        "Drop --distopt-reduce-dtype.",
    ),
    "our clipping": (
        _built(options=_OURS(clip_grad=3.5)),
        ConfigError,
        "3.5 in DistOptConfig(...)",
        "is 1.0",
    ),
    "our decay": (
        _built(optimizer=_L2, options=_OURS(decay="decoupled")),
        ConfigError,
        "'decoupled' in",
        "is 'l2'",
    ),
    "our shared memory, off": (
        lambda rank: _with_variable("MEGATRON_DISTOPT_SHARED_MEMORY", "no"),
        ConfigError,
        "Drop --distopt-shared-memory.",
    ),
    "required and not used": (
        lambda rank: _with_variable(
            "MEGATRON_DISTOPT", "require", optimizer={"use_distributed_optimizer": False}
        ),
        ConfigError,
        "Add --use-distributed-optimizer",
    ),
    "ranks disagree on options": (
        lambda rank: _build(optimizer={"lr": 0.1 if rank == 1 else 0.2}),
        RanksDisagreeError,
        "options: rank 1 has lr=0.1",
        "rank 0 has lr=0.2",
        "Start rank(s) 1 with the code and options of the others.",
    ),
    "other ddp options": (
        lambda rank: _build(
            ddp={"overlap_grad_reduce": True, "bucket_size": 999 if rank == 1 else 1}
        ),
        RanksDisagreeError,
        "host options: rank 1 has bucket_size=999",
        "rank 0 has bucket_size=1",
    ),
    "no groups": (
        lambda rank: _build().load_state_dict({"inner": "adam", "param_groups": []}),
        CheckpointError,
        "must have 'optimizer' with param_groups",
        _TAKE_ANOTHER,
    ),
    "fewer groups": (
        lambda rank: _build().load_state_dict({"optimizer": {"param_groups": [{}]}}),
        CheckpointError,
        "state has 1 param groups, but this optimizer has 2",
        _TAKE_ANOTHER,
    ),
}
#: The same for what rank 1 alone runs into.
ON_RANK_1: dict[str, tuple[Any, ...]] = {
    "one rank only": (lambda rank: _build(double=rank == 1), *FLOAT64),
    "bad variable": (
        lambda rank: _with_variable("MEGATRON_DISTOPT_NONFINITE", "ignore", rank == 1),
        ConfigError,
        "MEGATRON_DISTOPT_NONFINITE is 'ignore'",
        "one of raise, skip, log.",
    ),
}
SERVED: dict[str, Make] = {"unknown field, default": _built(newer=4)}


facts = facts_of(collect_facts, SIZE, core=True)


@pytest.mark.parametrize("name", ON_ALL)
def test_host_when_input_is_bad_then_every_rank_says_what_to_write(facts: Facts, name: str) -> None:
    _, kind, *parts = ON_ALL[name]
    for refused in facts[name]:
        assert refused is not None and refused == facts.first[name]
        assert refused[0] is kind
        assert_mentions(refused[1], *parts)


@pytest.mark.parametrize("name", SERVED)
def test_host_when_an_unknown_field_has_its_default_then_it_is_served(
    facts: Facts, name: str
) -> None:
    assert facts[name] == [None] * SIZE


@pytest.mark.parametrize("name", ON_RANK_1)
def test_host_when_one_rank_refuses_then_the_other_says_which(facts: Facts, name: str) -> None:
    _, kind, *parts = ON_RANK_1[name]
    other, own = facts[name]
    assert (
        own is not None and own[0] is kind and other is not None and other[0] is RanksDisagreeError
    )
    assert_mentions(own[1], *parts)
    assert_mentions(other[1], "start-up", f"rank 1 raised «{own[1]}»")


def test_host_when_switched_off_on_one_rank_then_the_other_names_it_and_nothing_hangs(
    facts: Facts,
) -> None:
    refused = facts.first["switched off"]
    assert refused is not None and refused[0] is RanksDisagreeError
    assert_mentions(
        refused[1],
        "not used on rank 1 (MEGATRON_DISTOPT=0)",
        "all 2 ranks",
        "the same flags and variables.",
    )
