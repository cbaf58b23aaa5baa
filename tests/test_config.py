"""Every option, what it refuses, and what environment variables may say."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distopt.config import (
    ADAM_SOURCES,
    FREE_OPTIONS,
    OPTIONS,
    DistOptConfig,
    NonFinitePolicy,
    Switch,
    config_from_arguments,
    config_from_environment,
    switch_from,
    with_options,
)
from megatron_distopt.errors import ConfigError
from megatron_distopt.options import SetBy, flag_of, variable_of
from tests.support.refusals import says

VARIABLES = ", ".join(["MEGATRON_DISTOPT", *map(variable_of, FREE_OPTIONS)])


NO_BUCKET = "Invalid bucket_size: {} ... Write bucket_size=None for one bucket."
NO_STEPS = "Invalid resume_step: {} ... Write {}1000, the updates that the checkpoint has seen."

#: The float64 numbers next to the bounds of a loss scale.
ABOVE_LARGEST = math.nextafter(2.0**127, math.inf)
BELOW_SMALLEST = math.nextafter(2.0**-126, 0.0)


def at_least_zero(name: str, got: object) -> str:
    return f"Invalid {name}: {got} ... Write {name}=0.0 for none."


def no_betas(got: object) -> str:
    return f"Invalid betas: {got} ... Write betas=(0.9, 0.999)."


def no_loss_scale(got: object) -> str:
    return f"Invalid loss_scale: {got} ... Write loss_scale=None for none."


def no_min_loss_scale(minimum: float, initial: float) -> str:
    return f"Invalid min_loss_scale: {minimum} with initial_loss_scale {initial} ... Write min_loss_scale=1.0."


def no_optimizer(got: str) -> str:
    return f"Invalid optimizer: {got!r} ... Write optimizer='adam'."


def no_whole_number(got: str, write: str = "--distopt-resume-step 10", name: str = "resume_step") -> str:
    return f"Invalid {name}: {got!r} ... Write {write}."


def no_format(got: str, nearest: str = "checkpoint_format='distopt'") -> str:
    return f"Invalid checkpoint_format: {got!r} ... Write {nearest}."


def no_keep_last(got: int, write: str = "keep_last=2") -> str:
    return f"Invalid keep_last: {got} ... Write {write}, or leave it out to keep all."


def no_switch(got: str, write: str = "MEGATRON_DISTOPT_ASYNC_SAVE=yes") -> str:
    return f"Invalid async_save: {got!r} ... Write {write}."


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"adam": "torch_fuse"}, "Invalid adam: 'torch_fuse' ... Write adam='torch_fused'."),
    ({"adam": "xyz"}, "Invalid adam: 'xyz' ... Write adam='auto'."),
    (
        {"accelerator": "deepsped"},
        "Invalid accelerator: 'deepsped' ... Write accelerator='deepspeed'.",
    ),
    (
        {"nonfinite": "skipp"},
        "Invalid nonfinite: 'skipp' ... Write nonfinite='skip'.",
    ),
    (
        {"nonfinite": "explode"},
        "Invalid nonfinite: 'explode' ... Write nonfinite='raise'.",
    ),
    *(
        ({"optimizer": name}, no_optimizer(name))
        for name in (
            "adamw",
            "",
            "torch.optim.Adagrad",
            ":Adagrad",
            ".optim:Adagrad",
            "torch.optim:",
            "torch..optim:Adagrad",
            "torch.optim:Adagrad:Adagrad",
            "torch.optim:Adagrad.step",
            "torch.optim: Adagrad",
            "torch.optim:Adagrad\n",
            "torch.2optim:Adagrad",
        )
    ),
    ({"muon_momentum": -0.5}, at_least_zero("muon_momentum", -0.5)),
    ({"muon_ns_steps": 0}, "Invalid muon_ns_steps: 0 ... Write muon_ns_steps=5, the usual number."),
    ({"muon_split": "kv"}, "Invalid muon_split: 'kv' ... Write muon_split='qkv'."),
    ({"muon_tp_mode": "blockwisee"}, "Invalid muon_tp_mode: 'blockwisee' ... Write muon_tp_mode='blockwise'."),
    ({"decay": "L2"}, "Invalid decay: 'L2' ... Write decay='l2'."),
    ({"decay": "decouple"}, "Invalid decay: 'decouple' ... Write decay='decoupled'."),
    ({"decay": ""}, "Invalid decay: '' ... Write decay='decoupled'."),
    (
        {"resume_step": -1},
        NO_STEPS.format(-1, "resume_step="),
    ),
    ({"lr": -1e-3}, at_least_zero("lr", -0.001)),
    ({"lr": math.nan}, at_least_zero("lr", "nan")),
    ({"weight_decay": math.inf}, at_least_zero("weight_decay", "inf")),
    ({"eps": -1.0}, at_least_zero("eps", -1.0)),
    ({"momentum": -0.5}, at_least_zero("momentum", -0.5)),
    ({"clip_grad": -1.0}, at_least_zero("clip_grad", -1.0)),
    *(
        ({"betas": betas}, no_betas(betas))
        for betas in ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (), (0.9,), (0.9, 0.99, 0.999))
    ),
    (
        {"log_communication": 0},
        "Invalid log_communication: 0 ... Write log_communication=1, or leave it out.",
    ),
    ({"growth_interval": 0}, "Invalid growth_interval: 0 ... Write growth_interval=1."),
    ({"hysteresis": 0}, "Invalid hysteresis: 0 ... Write hysteresis=1."),
    ({"async_buffer_mb": 0}, "Invalid async_buffer_mb: 0 ... Write async_buffer_mb=1."),
    ({"checkpoint_format": "gatherd"}, no_format("gatherd", "checkpoint_format='gathered'")),
    *(({"checkpoint_format": name}, no_format(name)) for name in ("", "dcp", "Distopt")),
    *(({"keep_last": number}, no_keep_last(number)) for number in (0, -1)),
    (
        {"bucket_size": 0},
        NO_BUCKET.format(0),
    ),
    (
        {"loss_scale": "static"},
        "Invalid loss_scale: 'static' ... Write loss_scale='dynamic'.",
    ),
    (
        {"loss_scale": "1024.0"},
        "Invalid loss_scale: '1024.0' ... Write loss_scale=1024.0.",
    ),
    *(
        ({"loss_scale": scale}, no_loss_scale(scale))
        for scale in (0.0, -8.0, math.inf, math.nan, 2.0**128, ABOVE_LARGEST, 2.0**-127, BELOW_SMALLEST)
    ),
    ({"min_loss_scale": 0.0}, no_min_loss_scale(0.0, 65536.0)),
    ({"min_loss_scale": BELOW_SMALLEST}, no_min_loss_scale(BELOW_SMALLEST, 65536.0)),
    ({"initial_loss_scale": ABOVE_LARGEST}, no_min_loss_scale(1.0, ABOVE_LARGEST)),
    ({"initial_loss_scale": math.inf}, no_min_loss_scale(1.0, math.inf)),
    ({"initial_loss_scale": math.nan}, no_min_loss_scale(1.0, math.nan)),
    ({"min_loss_scale": 4.0, "initial_loss_scale": 2.0}, no_min_loss_scale(4.0, 2.0)),
    ({"min_loss_scale": math.nan}, no_min_loss_scale(math.nan, 65536.0)),
]


@pytest.mark.parametrize(("options", "text"), REFUSALS)
def test_config_when_a_value_cannot_work_then_refused_with_the_rule_and_a_remedy(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        DistOptConfig(**options)
    assert says(error.value, text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"adam": source} for source in ADAM_SOURCES),
        *({"nonfinite": policy.value} for policy in NonFinitePolicy),
        {"optimizer": "sgd", "momentum": 0.0},
        {"optimizer": "muon", "muon_momentum": 0.0, "muon_ns_steps": 1},
        *({"optimizer": name} for name in ("torch.optim:Adagrad", "module:Class", "_my2.lion_3:_Lion4")),
        {"lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "betas": (0.0, 0.0)},
        *({"loss_scale": scale} for scale in (1024, 2**127, 2.0**127, 2.0**-126)),
        {"loss_scale": "dynamic", "min_loss_scale": 2.0**-126, "initial_loss_scale": 2.0**127},
        {"loss_scale": "dynamic", "min_loss_scale": 2.0, "initial_loss_scale": 2.0, "hysteresis": 1},
        {"bucket_size": 1, "growth_interval": 1},
        *({"decay": decay} for decay in ("decoupled", "l2")),
        *({"resume_step": step} for step in (None, 0, 1, 10**9)),
        {"checkpoint_format": "gathered", "async_save": True, "async_buffer_mb": 1, "keep_last": 1},
    ],
)
def test_config_when_values_are_at_the_border_then_accepted(options: dict[str, Any]) -> None:
    config = DistOptConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


def test_config_when_written_to_then_refused() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DistOptConfig().lr = 1.0  # type: ignore[misc]


def test_config_when_replaced_then_checked_again() -> None:
    with pytest.raises(ConfigError, match=r"^Invalid hysteresis: 0\. "):
        dataclasses.replace(DistOptConfig(), hysteresis=0)


def test_config_when_given_by_position_then_refused() -> None:
    with pytest.raises(TypeError, match="positional"):
        DistOptConfig("adam")  # type: ignore[call-arg]


@pytest.mark.parametrize("policy", NonFinitePolicy)
def test_policy_when_named_then_the_enum(policy: NonFinitePolicy) -> None:
    assert DistOptConfig(nonfinite=policy.value).policy is policy


@pytest.mark.parametrize(("decay", "is_decoupled"), [("decoupled", True), ("l2", False)])
def test_decay_when_named_then_the_yes_or_no(decay: str, is_decoupled: bool) -> None:
    assert DistOptConfig(decay=decay).is_decoupled is is_decoupled
    assert DistOptConfig().is_decoupled


#: For every option a value that is not its default.
OTHER_VALUES: dict[str, Any] = {
    "offload_fraction": 0.5,
    "optimizer": "sgd",
    "adam": "torch_foreach",
    "accelerator": "torch",
    "lr": 2e-3,
    "weight_decay": 0.5,
    "betas": (0.8, 0.9),
    "eps": 1e-6,
    "momentum": 0.1,
    "muon_momentum": 0.9,
    "muon_nesterov": False,
    "muon_ns_steps": 3,
    "muon_adjust_lr": "original",
    "muon_split": "all",
    "muon_tp_mode": "blockwise",
    "decay": "l2",
    "resume_step": 10,
    "clip_grad": 1.0,
    "count_zeros": True,
    "loss_scale": "dynamic",
    "initial_loss_scale": 8.0,
    "min_loss_scale": 0.5,
    "growth_interval": 5,
    "hysteresis": 3,
    "nonfinite": "skip",
    "grads_in_fp32": False,
    "bucket_size": 100,
    "main_params_dtype": "remainder",
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "int8",
    "checkpoint_format": "gathered",
    "async_save": True,
    "async_buffer_mb": 64,
    "keep_last": 3,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "log_communication": 10,
    "log_digests": 100,
    "digest_file": "/tmp/digests",
    "deterministic": True,
    "reduce_dtype": "bfloat16",
    "shared_memory": False,
}


def test_described_when_read_then_it_names_every_option_in_order() -> None:
    names = [line.partition("=")[0] for line in DistOptConfig().described()]
    assert names == list(OPTIONS)
    assert sorted(names) == sorted(OTHER_VALUES)
    assert [field.name for field in dataclasses.fields(DistOptConfig)] == [*names, "explicit"]


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_described_when_one_option_differs_then_one_line_does(name: str) -> None:
    plain = DistOptConfig().described()
    changed = DistOptConfig(**{name: OTHER_VALUES[name]}).described()
    assert set(changed) - set(plain) == {f"{name}={OTHER_VALUES[name]!r}"}


def test_environment_when_variables_are_set_then_they_stand_in_for_what_code_leaves_open() -> None:
    environ = {
        "MEGATRON_DISTOPT_ADAM": "torch_foreach",
        "MEGATRON_DISTOPT_OPTIMIZER": "torch.optim:AdamW",
        "MEGATRON_DISTOPT_NONFINITE": "log",
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        "MEGATRON_DISTOPT_DECAY": "l2",
        "MEGATRON_DISTOPT_RESUME_STEP": "12",
        "MEGATRON_DISTOPT_CHECKPOINT_FORMAT": "gathered",
        "MEGATRON_DISTOPT_ASYNC_SAVE": "1",
        "MEGATRON_DISTOPT_ASYNC_BUFFER_MB": "64",
        "MEGATRON_DISTOPT_KEEP_LAST": "3",
        "MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE": "no",
        "MEGATRON_DISTOPT_OVERLAP_PARAM_GATHER": "yes",
        "MEGATRON_DISTOPT_BUCKET_SIZE": "1000000",
        "MEGATRON_DISTOPT_LOG_COMMUNICATION": "10",
        "MEGATRON_DISTOPT_LOG_DIGESTS": "100",
        "MEGATRON_DISTOPT_DIGEST_FILE": "/runs/digests",
        "MEGATRON_DISTOPT_DETERMINISTIC": "yes",
        "MEGATRON_DISTOPT_REDUCE_DTYPE": "none",
        "MEGATRON_DISTOPT_SHARED_MEMORY": "no",
        "MEGATRON_DISTOPT_MUON_MOMENTUM": "0.5",
        "MEGATRON_DISTOPT_MUON_NESTEROV": "no",
        "MEGATRON_DISTOPT_MUON_NS_STEPS": "7",
        "MEGATRON_DISTOPT_MUON_ADJUST_LR": "original",
        "MEGATRON_DISTOPT_MUON_SPLIT": "none",
        "MEGATRON_DISTOPT_MUON_TP_MODE": "distributed",
        "MEGATRON_DISTOPT_MAIN_PARAMS_DTYPE": "remainder",
        "MEGATRON_DISTOPT_EXP_AVG_DTYPE": "float16",
        "MEGATRON_DISTOPT_EXP_AVG_SQ_DTYPE": "float8_e4m3fn",
        "MEGATRON_DISTOPT": "require",
        "MEGATRON_PATH": "not ours",
        "HOME": "/root",
    }
    config = config_from_environment(environ, DistOptConfig(lr=0.5, grads_in_fp32=False))
    expected = DistOptConfig(
        lr=0.5,
        grads_in_fp32=False,
        adam="torch_foreach",
        optimizer="torch.optim:AdamW",
        nonfinite="log",
        accelerator="torch",
        decay="l2",
        resume_step=12,
        checkpoint_format="gathered",
        async_save=True,
        async_buffer_mb=64,
        keep_last=3,
        overlap_grad_reduce=False,
        overlap_param_gather=True,
        bucket_size=1_000_000,
        log_communication=10,
        log_digests=100,
        digest_file="/runs/digests",
        deterministic=True,
        shared_memory=False,
        muon_momentum=0.5,
        muon_nesterov=False,
        muon_ns_steps=7,
        muon_adjust_lr="original",
        muon_split="none",
        muon_tp_mode="distributed",
        main_params_dtype="remainder",
        exp_avg_dtype="float16",
        exp_avg_sq_dtype="float8_e4m3fn",
    )
    assert config == expected


@pytest.mark.parametrize(("value", "choice"), [("auto", None), ("Auto", None), ("yes", True), ("0", False)])
def test_environment_when_a_switch_can_be_left_to_us_then_auto_does_so(value: str, choice: bool | None) -> None:
    given = {"MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE": value}
    assert config_from_environment(given).overlap_grad_reduce is choice


@pytest.mark.parametrize(
    ("value", "is_on"),
    [
        *((word, True) for word in ("1", "true", "yes", "Yes", "on", "ON")),
        *((word, False) for word in ("0", "false", "no", "NO", "off")),
    ],
)
def test_environment_when_a_switch_is_set_then_every_usual_word_is_taken(value: str, is_on: bool) -> None:
    # One switch that is off by default, and one that is on.
    given = {"MEGATRON_DISTOPT_ASYNC_SAVE": value, "MEGATRON_DISTOPT_SHARED_MEMORY": value}
    config = config_from_environment(given)
    assert (config.async_save, config.shared_memory) == (is_on, is_on)


def test_environment_when_nothing_is_set_then_the_config_as_it_is() -> None:
    config = DistOptConfig(lr=0.5)
    assert config_from_environment({}, config) == config
    assert config_from_environment({}) == DistOptConfig()


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("MEGATRON_DISTOPT_ADAN", "Write MEGATRON_DISTOPT_ADAM"),
        ("MEGATRON_DISTOPT_NON_FINITE", "Write MEGATRON_DISTOPT_NONFINITE"),
        ("MEGATRON_DISTOPT_OPTIMISER", "Write MEGATRON_DISTOPT_OPTIMIZER"),
        ("MEGATRON_DISTOPT_ACCEL", "Write MEGATRON_DISTOPT_ACCELERATOR"),
        # Nothing like any of ours but for the prefix.
        ("MEGATRON_DISTOPT_LR", "Unset MEGATRON_DISTOPT_LR"),
        ("MEGATRON_DISTOPT_BUCKET_SIZES", "Write MEGATRON_DISTOPT_BUCKET_SIZE"),
        ("MEGATRON_DISTOPT_", "Unset MEGATRON_DISTOPT_"),
        ("MEGATRON_DISTOPT_" + "Z" * 40, "Unset MEGATRON_DISTOPT_" + "Z" * 40),
    ],
)
def test_environment_when_a_variable_is_unknown_then_refused_with_the_valid_ones_and_the_nearest(
    variable: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_environment({variable: "1"})
    assert says(error.value, f"Invalid environment variable: {variable} ... {remedy}.")
    assert VARIABLES in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        (
            "MEGATRON_DISTOPT_NONFINITE",
            "ignore",
            "Invalid nonfinite: 'ignore' ... Write MEGATRON_DISTOPT_NONFINITE=raise.",
        ),
        ("MEGATRON_DISTOPT_ADAM", "", "Invalid adam: '' ... Write MEGATRON_DISTOPT_ADAM=auto."),
        *(
            (
                "MEGATRON_DISTOPT_DECAY",
                value,
                f"Invalid decay: {value!r} ... Write MEGATRON_DISTOPT_DECAY={meant}.",
            )
            for value, meant in (("L2", "l2"), ("Decoupled", "decoupled"), ("none", "decoupled"))
        ),
        *(
            (variable, value, no_whole_number(value, f"{variable}=10", name))
            for variable, name in (
                ("MEGATRON_DISTOPT_RESUME_STEP", "resume_step"),
                ("MEGATRON_DISTOPT_ASYNC_BUFFER_MB", "async_buffer_mb"),
                ("MEGATRON_DISTOPT_KEEP_LAST", "keep_last"),
                ("MEGATRON_DISTOPT_BUCKET_SIZE", "bucket_size"),
            )
            for value in ("", "ten", "1e3", "1.5", "40MB")
        ),
        *(("MEGATRON_DISTOPT_ASYNC_SAVE", value, no_switch(value)) for value in ("", "auto", "2", "yes!")),
        ("MEGATRON_DISTOPT_KEEP_LAST", "0", no_keep_last(0, "MEGATRON_DISTOPT_KEEP_LAST=2")),
        ("MEGATRON_DISTOPT_RESUME_STEP", "-1", NO_STEPS.format(-1, "MEGATRON_DISTOPT_RESUME_STEP=")),
        (
            "MEGATRON_DISTOPT_BUCKET_SIZE",
            "-1",
            "Invalid bucket_size: -1 ... Unset MEGATRON_DISTOPT_BUCKET_SIZE for one bucket.",
        ),
        (
            "MEGATRON_DISTOPT_LOG_COMMUNICATION",
            "0",
            "Invalid log_communication: 0 ... Write MEGATRON_DISTOPT_LOG_COMMUNICATION=1, or leave it out.",
        ),
        (
            "MEGATRON_DISTOPT_REDUCE_DTYPE",
            "bf16",
            "Invalid reduce_dtype: 'bf16' ... Write MEGATRON_DISTOPT_REDUCE_DTYPE=bfloat16.",
        ),
        (
            "MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE",
            "maybe",
            "Invalid overlap_grad_reduce: 'maybe' ... Write MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE=yes.",
        ),
        (
            "MEGATRON_DISTOPT_CHECKPOINT_FORMAT",
            "torch",
            no_format("torch", "MEGATRON_DISTOPT_CHECKPOINT_FORMAT=distopt"),
        ),
    ],
)
def test_environment_when_a_value_is_bad_then_refused_with_the_variable(variable: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_environment({variable: value})
    assert says(error.value, text)


def test_namespace_when_attributes_are_there_then_they_stand_in_for_what_code_leaves_open() -> None:
    given = Namespace(
        distopt_adam="torch_foreach",
        distopt_decay="l2",
        distopt_resume_step="7",
        distopt_nonfinite=None,
        distopt_lr=0.1,  # no option of ours that a host has no flag for
        adam="apex",
        lr=0.2,
    )
    config = config_from_arguments(given, DistOptConfig(lr=0.5, nonfinite="log"))
    assert config == DistOptConfig(lr=0.5, nonfinite="log", adam="torch_foreach", decay="l2", resume_step=7)


def test_namespace_when_it_has_none_of_ours_then_the_config_as_it_is() -> None:
    assert config_from_arguments(Namespace()) == DistOptConfig()
    assert config_from_arguments(Namespace(distopt_adam=None), DistOptConfig(lr=0.5)) == DistOptConfig(lr=0.5)


def test_namespace_when_the_number_is_one_already_then_taken() -> None:
    """Arguments that a host kept in a checkpoint, or that a script wrote."""
    assert config_from_arguments(Namespace(distopt_resume_step=0)).resume_step == 0
    given = Namespace(distopt_async_save=True, distopt_async_buffer_mb=64, distopt_keep_last=3)
    assert config_from_arguments(given) == DistOptConfig(async_save=True, async_buffer_mb=64, keep_last=3)
    assert not config_from_arguments(Namespace(distopt_shared_memory=False)).shared_memory


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"distopt_resume_step": "soon"}, no_whole_number("soon")),
        ({"distopt_resume_step": 1.5}, no_whole_number("1.5")),
        (
            {"distopt_resume_step": "-3"},
            NO_STEPS.format(-3, "--distopt-resume-step "),
        ),
        (
            {"distopt_decay": "none"},
            "Invalid decay: 'none' ... Write --distopt-decay decoupled.",
        ),
        ({"distopt_async_save": "data"}, no_switch("data", "--distopt-async-save yes")),
        ({"distopt_keep_last": "-2"}, no_keep_last(-2, "--distopt-keep-last 2")),
        ({"distopt_checkpoint_format": "none"}, no_format("none", "--distopt-checkpoint-format distopt")),
        (
            {"distopt_bucket_size": "0"},
            "Invalid bucket_size: 0 ... Drop --distopt-bucket-size for one bucket.",
        ),
    ],
)
def test_namespace_when_a_value_is_bad_then_refused_like_the_option(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_arguments(Namespace(**given))
    assert says(error.value, text)


NOT_OF_THE_TYPE: list[tuple[dict[str, Any], str, str]] = [
    ({"overlap_grad_reduce": "no"}, "'no' of type str", "Write overlap_grad_reduce=False."),
    ({"overlap_grad_reduce": "auto"}, "'auto' of type str", "Write overlap_grad_reduce=None."),
    ({"async_save": 1}, "1 of type int", "Write async_save=True."),
    ({"shared_memory": None}, "None of type NoneType", "Write shared_memory=True."),
    ({"count_zeros": np.True_}, "np.True_ of type bool", "Write count_zeros=True."),
    ({"hysteresis": math.nan}, "nan of type float", "Write hysteresis=2."),
    ({"growth_interval": 1.5}, "1.5 of type float", "Write growth_interval=2."),
    ({"growth_interval": 1000.0}, "1000.0 of type float", "Write growth_interval=1000."),
    ({"hysteresis": True}, "True of type bool", "Write hysteresis=2."),
    ({"bucket_size": "4e7"}, "'4e7' of type str", "Write bucket_size=40000000."),
    (
        {"bucket_size": np.float32(8)},
        "np.float32(8.0) of type float32",
        "Write bucket_size=8.",
    ),
    ({"keep_last": True}, "True of type bool", "Write keep_last=None."),
    ({"lr": "3e-4"}, "'3e-4' of type str", "Write lr=0.0003."),
    ({"lr": True}, "True of type bool", "Write lr=0.001."),
    ({"lr": None}, "None of type NoneType", "Write lr=0.001."),
    ({"lr": torch.tensor(0.25)}, "tensor(0.2500) of type Tensor", "Write lr=0.25."),
    ({"weight_decay": 10**400}, f"1{59 * '0'}... of type int", "Write weight_decay=0.01."),
    ({"clip_grad": "all"}, "'all' of type str", "Write clip_grad=0.0."),
    ({"betas": "0.9,0.95"}, "'0.9,0.95' of type str", "Write betas=(0.9, 0.999)."),
    ({"betas": ("0.9", "0.95")}, "('0.9', '0.95') of type tuple", "Write betas=(0.9, 0.95)."),
    ({"betas": 0.9}, "0.9 of type float", "Write betas=(0.9, 0.999)."),
    ({"loss_scale": True}, "True of type bool", "Write loss_scale=None."),
    ({"initial_loss_scale": "2**16"}, "'2**16' of type str", "Write initial_loss_scale=65536.0."),
    ({"nonfinite": NonFinitePolicy.SKIP}, "<NonFinitePolicy.SKIP", "Write nonfinite='skip'."),
    ({"nonfinite": None}, "None of type NoneType", "Write nonfinite='raise'."),
    (
        {"reduce_dtype": torch.bfloat16},
        "torch.bfloat16 of type dtype",
        "Write reduce_dtype='bfloat16'.",
    ),
    ({"optimizer": torch.optim.SGD}, "<class ", "Write optimizer='torch.optim.sgd:SGD'."),
]


@pytest.mark.parametrize(("options", "got", "remedy"), NOT_OF_THE_TYPE)
def test_config_when_a_value_is_of_another_type_then_refused_with_what_was_meant(
    options: dict[str, Any], got: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        DistOptConfig(**options)
    ((name, _),) = options.items()
    assert str(error.value).startswith(f"Invalid {name}: {got}")
    assert str(error.value).endswith(f". {remedy}")


def test_config_when_numbers_are_numpys_then_pythons_own_of_the_same_value() -> None:
    """Or two ranks of which one wrote 0.1 and one np.float64(0.1) would seem to disagree."""
    config = DistOptConfig(lr=np.float32(0.5), eps=np.float64(0.25), hysteresis=np.int64(3), betas=[np.float16(0.5), 0])  # type: ignore[arg-type]
    plain = DistOptConfig(lr=0.5, eps=0.25, hysteresis=3, betas=(0.5, 0.0))
    assert config == plain
    assert config.described() == plain.described()


@pytest.mark.parametrize("make", [DistOptConfig, lambda **given: with_options(DistOptConfig(), given)])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("clip_gard", "Write clip_grad=..."),
        ("Overlap_Grad_Reduce", "Write overlap_grad_reduce=..."),
        ("bucket_sizes", "Write bucket_size=..."),
        ("zzz", "help(megatron_distopt.DistOptConfig) lists them"),
    ],
)
def test_config_when_an_option_does_not_exist_then_refused_with_the_nearest(
    make: Callable[..., object], name: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make(**{name: 1})
    assert says(error.value, f"Invalid option: {name} ... {remedy}.")


def as_text(value: object) -> str:
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


#: For every free option a value that is not its default, as text.
OTHER_TEXTS = {name: as_text(OTHER_VALUES[name]) for name in FREE_OPTIONS}


@pytest.mark.parametrize("name", FREE_OPTIONS)
def test_option_when_code_flag_and_variable_say_something_then_code_wins_then_the_flag(name: str) -> None:
    default = getattr(DistOptConfig(), name)
    variables = {f"MEGATRON_DISTOPT_{name.upper()}": OTHER_TEXTS[name]}
    flags = Namespace(**{f"distopt_{name}": OTHER_TEXTS[name]})
    in_code = DistOptConfig(**{name: default})
    assert getattr(config_from_environment(variables), name) == OTHER_VALUES[name]
    assert getattr(config_from_arguments(flags), name) == OTHER_VALUES[name]
    assert getattr(config_from_environment(variables, config_from_arguments(flags, in_code)), name) == default
    assert getattr(config_from_environment(variables, with_options(DistOptConfig(), {name: default})), name) == default
    if default is not None and name != "optimizer":  # what a flag says, be it the default, stands before the variable
        said = config_from_arguments(Namespace(**{f"distopt_{name}": as_text(default)}))
        assert getattr(config_from_environment(variables, said), name) == default


def test_variable_when_code_overrides_it_then_its_value_is_not_looked_at() -> None:
    environ = {"MEGATRON_DISTOPT_ADAM": "no such", "MEGATRON_DISTOPT_KEEP_LAST": "many"}
    config = DistOptConfig(adam="auto", keep_last=None)
    assert config_from_environment(environ, config) == DistOptConfig()


def test_explicit_when_replaced_copied_or_pickled_then_it_stays() -> None:
    config = DistOptConfig(adam="auto", lr=0.5)
    assert config.explicit == {"adam", "lr"}
    assert dataclasses.replace(config, clip_grad=1.0).explicit == {"adam", "lr", "clip_grad"}
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (other, other.explicit) == (config, config.explicit)
    assert DistOptConfig().explicit == frozenset()
    assert DistOptConfig(lr=1e-3) == DistOptConfig()


@pytest.mark.parametrize(
    ("environ", "switch"),
    [
        ({}, Switch.ON),
        ({"MEGATRON_DISTOPT": "0"}, Switch.OFF),
        ({"MEGATRON_DISTOPT": "1"}, Switch.ON),
        ({"MEGATRON_DISTOPT": "require"}, Switch.REQUIRE),
        ({"MEGATRON_DISTOPT": "Require"}, Switch.REQUIRE),
        *(({"MEGATRON_DISTOPT": word}, Switch.ON) for word in ("yes", "true", "on", "True")),
        *(({"MEGATRON_DISTOPT": word}, Switch.OFF) for word in ("no", "false", "off", "OFF")),
    ],
)
def test_switch_when_set_or_not_then_this_member(environ: dict[str, str], switch: Switch) -> None:
    assert switch_from(environ) is switch


@pytest.mark.parametrize(
    ("value", "nearest"),
    [("requires", "require"), ("REQUIR", "require"), ("00", "0"), ("11", "1"), ("2", "1"), ("", "1")],
)
def test_switch_when_the_value_is_unknown_then_refused_and_the_nearest_or_the_default_is_named(
    value: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as error:
        switch_from({"MEGATRON_DISTOPT": value})
    text = f"Invalid MEGATRON_DISTOPT: {value!r} ... Write MEGATRON_DISTOPT={nearest}."
    assert says(error.value, text)


def test_declarations_when_read_then_every_option_is_in_help_and_every_free_one_has_flag_and_variable() -> None:
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(DistOptConfig)} - {"explicit"}
    for name, declared in OPTIONS.items():
        assert f"{name}: {declared.meaning}." in str(DistOptConfig.__doc__)
        assert declared.default == getattr(DistOptConfig(), name)
        assert (name in FREE_OPTIONS) == (declared.set_by is SetBy.FLAG)
    assert (flag_of("keep_last"), variable_of("keep_last")) == ("--distopt-keep-last", "MEGATRON_DISTOPT_KEEP_LAST")


def test_config_when_imported_alone_then_torch_is_not() -> None:
    """Launchers and command lines check options before anything heavy is loaded."""
    probe = "import sys; import megatron_distopt.config; print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["False", "False"]
