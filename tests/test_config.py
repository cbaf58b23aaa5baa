"""Every option, what it refuses word for word, and what environment variables may say."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest

from megatron_distopt.config import (
    ADAM_SOURCES,
    DistOptConfig,
    NonFinitePolicy,
    Switch,
    config_from_environment,
    config_from_namespace,
    switch_from,
    with_free_options,
)
from megatron_distopt.errors import ConfigError

ADAMS = "auto, transformer_engine, apex, deepspeed, torch_fused, torch_foreach, deepspeed_cpu, triton"
VARIABLES = (
    "MEGATRON_DISTOPT, MEGATRON_DISTOPT_ADAM, MEGATRON_DISTOPT_OPTIMIZER, "
    "MEGATRON_DISTOPT_NONFINITE, MEGATRON_DISTOPT_ACCELERATOR, MEGATRON_DISTOPT_DECAY, MEGATRON_DISTOPT_RESUME_STEP, "
    "MEGATRON_DISTOPT_CHECKPOINT_FORMAT, MEGATRON_DISTOPT_ASYNC_SAVE, MEGATRON_DISTOPT_ASYNC_BUFFER_MB, "
    "MEGATRON_DISTOPT_KEEP_LAST, MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE, MEGATRON_DISTOPT_OVERLAP_PARAM_GATHER, "
    "MEGATRON_DISTOPT_BUCKET_SIZE, MEGATRON_DISTOPT_LOG_COMMUNICATION, MEGATRON_DISTOPT_WIRE_DTYPE, "
    "MEGATRON_DISTOPT_SHARED_MEMORY"
)

NO_BUCKET = "Invalid bucket_numel: {}. Must be at least 1 element. Write bucket_numel=None for one bucket."
NO_LOG = "Invalid log_communication: 0. Must be at least every step. Write log_communication=1, or leave it out."

#: The float64 numbers next to the bounds of a loss scale.
ABOVE_LARGEST = math.nextafter(2.0**127, math.inf)
BELOW_SMALLEST = math.nextafter(2.0**-126, 0.0)


def at_least_zero(name: str, got: object) -> str:
    return f"Invalid {name}: {got}. Must be a finite number of at least 0. Write {name}=0.0 for none."


def no_betas(got: object) -> str:
    return f"Invalid betas: {got}. Must be 2 numbers of at least 0 and below 1. Write betas=(0.9, 0.999)."


def no_loss_scale(got: object) -> str:
    return (
        f"Invalid loss_scale: {got}. Must be None, 'dynamic' or a number from 2**-126 to 2**127. "
        "Write loss_scale=None for none."
    )


def no_min_loss_scale(minimum: float, initial: float) -> str:
    return (
        f"Invalid min_loss_scale: {minimum} with initial_loss_scale {initial}. "
        "Must be at least 2**-126 and at most the initial one, which must be at most 2**127. Write min_loss_scale=1.0."
    )


def no_optimizer(got: str) -> str:
    return f"Invalid optimizer: {got!r}. Must be one of adam, sgd, module:Class. Write optimizer='adam'."


def no_whole_number(got: str, name: str = "resume_step") -> str:
    return f"Invalid {name}: {got!r}. Must be a whole number. Write {name}=10."


def no_format(got: str, nearest: str = "distopt") -> str:
    return f"Invalid checkpoint_format: {got!r}. Must be one of distopt, native. Write checkpoint_format={nearest!r}."


def no_keep_last(got: int) -> str:
    return f"Invalid keep_last: {got}. Must be at least 1 checkpoint. Write keep_last=2, or leave it out to keep all."


def no_switch(got: str) -> str:
    return f"Invalid async_save: {got!r}. Must be yes or no. Write async_save=yes."


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"adam": "torch_fuse"}, f"Invalid adam: 'torch_fuse'. Must be one of {ADAMS}. Write adam='torch_fused'."),
    ({"adam": "xyz"}, f"Invalid adam: 'xyz'. Must be one of {ADAMS}. Write adam='auto'."),
    (
        {"accelerator": "deepsped"},
        "Invalid accelerator: 'deepsped'. Must be one of auto, deepspeed, torch. Write accelerator='deepspeed'.",
    ),
    (
        {"nonfinite": "skipp"},
        "Invalid nonfinite: 'skipp'. Must be one of raise, skip, log. Write nonfinite='skip'.",
    ),
    (
        {"nonfinite": "explode"},
        "Invalid nonfinite: 'explode'. Must be one of raise, skip, log. Write nonfinite='raise'.",
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
    ({"decay": "L2"}, "Invalid decay: 'L2'. Must be one of decoupled, l2. Write decay='decoupled'."),
    ({"decay": "decouple"}, "Invalid decay: 'decouple'. Must be one of decoupled, l2. Write decay='decoupled'."),
    ({"decay": ""}, "Invalid decay: ''. Must be one of decoupled, l2. Write decay='decoupled'."),
    (
        {"resume_step": -1},
        "Invalid resume_step: -1. Must be at least 0 updates. Write the iteration at which the checkpoint was saved.",
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
    ({"growth_interval": 0}, "Invalid growth_interval: 0. Must be at least 1. Write growth_interval=1."),
    ({"hysteresis": 0}, "Invalid hysteresis: 0. Must be at least 1. Write hysteresis=1."),
    ({"async_buffer_mb": 0}, "Invalid async_buffer_mb: 0. Must be at least 1. Write async_buffer_mb=1."),
    ({"checkpoint_format": "nativ"}, no_format("nativ", "native")),
    *(({"checkpoint_format": name}, no_format(name)) for name in ("", "dcp", "Distopt")),
    *(({"keep_last": number}, no_keep_last(number)) for number in (0, -1)),
    (
        {"bucket_numel": 0},
        NO_BUCKET.format(0),
    ),
    (
        {"loss_scale": "static"},
        "Invalid loss_scale: 'static'. Must be None, a positive number or 'dynamic'. Write loss_scale='dynamic'.",
    ),
    *(
        ({"loss_scale": scale}, no_loss_scale(scale))
        for scale in (0.0, -8, math.inf, math.nan, 2**128, ABOVE_LARGEST, 2.0**-127, BELOW_SMALLEST)
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
    assert str(error.value) == text


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"adam": source} for source in ADAM_SOURCES),
        *({"nonfinite": policy.value} for policy in NonFinitePolicy),
        {"optimizer": "sgd", "momentum": 0.0},
        *({"optimizer": name} for name in ("torch.optim:Adagrad", "module:Class", "_my2.lion_3:_Lion4")),
        {"lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "betas": (0.0, 0.0)},
        *({"loss_scale": scale} for scale in (1024, 2**127, 2.0**127, 2.0**-126)),
        {"loss_scale": "dynamic", "min_loss_scale": 2.0**-126, "initial_loss_scale": 2.0**127},
        {"loss_scale": "dynamic", "min_loss_scale": 2.0, "initial_loss_scale": 2.0, "hysteresis": 1},
        {"bucket_numel": 1, "growth_interval": 1},
        *({"decay": decay} for decay in ("decoupled", "l2")),
        *({"resume_step": step} for step in (None, 0, 1, 10**9)),
        {"checkpoint_format": "native", "async_save": True, "async_buffer_mb": 1, "keep_last": 1},
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
    "optimizer": "sgd",
    "adam": "torch_foreach",
    "accelerator": "torch",
    "lr": 2e-3,
    "weight_decay": 0.5,
    "betas": (0.8, 0.9),
    "eps": 1e-6,
    "momentum": 0.1,
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
    "bucket_numel": 100,
    "checkpoint_format": "native",
    "async_save": True,
    "async_buffer_mb": 64,
    "keep_last": 3,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "log_communication": 10,
    "wire_dtype": "bfloat16",
    "shared_memory": False,
}


def test_described_when_read_then_it_names_every_option_in_order() -> None:
    names = [line.partition("=")[0] for line in DistOptConfig().described()]
    assert names == [field.name for field in dataclasses.fields(DistOptConfig)]
    assert sorted(names) == sorted(OTHER_VALUES)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_described_when_one_option_differs_then_one_line_does(name: str) -> None:
    plain = DistOptConfig().described()
    changed = DistOptConfig(**{name: OTHER_VALUES[name]}).described()
    assert set(changed) - set(plain) == {f"{name}={OTHER_VALUES[name]!r}"}


def test_environment_when_variables_are_set_then_they_override_the_config() -> None:
    environ = {
        "MEGATRON_DISTOPT_ADAM": "torch_foreach",
        "MEGATRON_DISTOPT_OPTIMIZER": "torch.optim:AdamW",
        "MEGATRON_DISTOPT_NONFINITE": "log",
        "MEGATRON_DISTOPT_ACCELERATOR": "torch",
        "MEGATRON_DISTOPT_DECAY": "l2",
        "MEGATRON_DISTOPT_RESUME_STEP": "12",
        "MEGATRON_DISTOPT_CHECKPOINT_FORMAT": "native",
        "MEGATRON_DISTOPT_ASYNC_SAVE": "1",
        "MEGATRON_DISTOPT_ASYNC_BUFFER_MB": "64",
        "MEGATRON_DISTOPT_KEEP_LAST": "3",
        "MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE": "no",
        "MEGATRON_DISTOPT_OVERLAP_PARAM_GATHER": "yes",
        "MEGATRON_DISTOPT_BUCKET_SIZE": "1000000",
        "MEGATRON_DISTOPT_LOG_COMMUNICATION": "10",
        "MEGATRON_DISTOPT_WIRE_DTYPE": "none",
        "MEGATRON_DISTOPT_SHARED_MEMORY": "no",
        "MEGATRON_DISTOPT": "require",
        "MEGATRON_PATH": "not ours",
        "HOME": "/root",
    }
    config = config_from_environment(environ, DistOptConfig(lr=0.5, adam="apex", wire_dtype="float16"))
    expected = DistOptConfig(
        lr=0.5,
        adam="torch_foreach",
        optimizer="torch.optim:AdamW",
        nonfinite="log",
        accelerator="torch",
        decay="l2",
        resume_step=12,
        checkpoint_format="native",
        async_save=True,
        async_buffer_mb=64,
        keep_last=3,
        overlap_grad_reduce=False,
        overlap_param_gather=True,
        bucket_numel=1_000_000,
        log_communication=10,
        shared_memory=False,
    )
    assert config == expected


@pytest.mark.parametrize(("value", "choice"), [("auto", None), ("Auto", None), ("yes", True), ("0", False)])
def test_environment_when_a_switch_can_be_left_to_us_then_auto_does_so(value: str, choice: bool | None) -> None:
    given = {"MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE": value}
    assert config_from_environment(given, DistOptConfig(overlap_grad_reduce=False)).overlap_grad_reduce is choice


@pytest.mark.parametrize(
    ("value", "is_on"),
    [*((word, True) for word in ("1", "true", "yes", "Yes")), *((word, False) for word in ("0", "false", "no", "NO"))],
)
def test_environment_when_a_switch_is_set_then_it_overrides_either_way(value: str, is_on: bool) -> None:
    given = {"MEGATRON_DISTOPT_ASYNC_SAVE": value}
    assert config_from_environment(given, DistOptConfig(async_save=not is_on)).async_save is is_on


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
        ("MEGATRON_DISTOPT_BUCKET_NUMEL", "Write MEGATRON_DISTOPT_BUCKET_SIZE"),
        ("MEGATRON_DISTOPT_", "Unset MEGATRON_DISTOPT_"),
        ("MEGATRON_DISTOPT_" + "Z" * 40, "Unset MEGATRON_DISTOPT_" + "Z" * 40),
    ],
)
def test_environment_when_a_variable_is_unknown_then_refused_with_the_valid_ones_and_the_nearest(
    variable: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_environment({variable: "1"})
    assert str(error.value) == f"Invalid environment variable: {variable}. Must be one of {VARIABLES}. {remedy}."


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        (
            "MEGATRON_DISTOPT_NONFINITE",
            "ignore",
            "Invalid nonfinite: 'ignore'. Must be one of raise, skip, log. Write nonfinite='raise'.",
        ),
        ("MEGATRON_DISTOPT_ADAM", "", f"Invalid adam: ''. Must be one of {ADAMS}. Write adam='auto'."),
        ("MEGATRON_DISTOPT_DECAY", "l1", "Invalid decay: 'l1'. Must be one of decoupled, l2. Write decay='decoupled'."),
        *(("MEGATRON_DISTOPT_RESUME_STEP", value, no_whole_number(value)) for value in ("", "ten", "1e3", "10.0")),
        *(("MEGATRON_DISTOPT_ASYNC_SAVE", value, no_switch(value)) for value in ("", "on", "2", "yes!")),
        *(
            (f"MEGATRON_DISTOPT_{name.upper()}", value, no_whole_number(value, name))
            for name in ("async_buffer_mb", "keep_last")
            for value in ("", "1.5", "4096MB")
        ),
        ("MEGATRON_DISTOPT_KEEP_LAST", "0", no_keep_last(0)),
        ("MEGATRON_DISTOPT_BUCKET_SIZE", "-1", NO_BUCKET.format(-1)),
        ("MEGATRON_DISTOPT_BUCKET_SIZE", "40MB", no_whole_number("40MB", "bucket_numel")),
        ("MEGATRON_DISTOPT_LOG_COMMUNICATION", "0", NO_LOG),
        (
            "MEGATRON_DISTOPT_WIRE_DTYPE",
            "bf16",
            "Invalid wire_dtype: 'bf16'. Must be one of None, bfloat16, float16. Write wire_dtype='bfloat16'.",
        ),
        (
            "MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE",
            "maybe",
            "Invalid overlap_grad_reduce: 'maybe'. Must be yes, no or auto. Write overlap_grad_reduce=yes.",
        ),
        ("MEGATRON_DISTOPT_CHECKPOINT_FORMAT", "torch", no_format("torch")),
    ],
)
def test_environment_when_a_value_is_bad_then_refused_like_the_option(variable: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_environment({variable: value})
    assert str(error.value) == text


def test_namespace_when_attributes_are_there_then_they_override_the_config() -> None:
    given = Namespace(
        distopt_adam="torch_foreach",
        distopt_decay="l2",
        distopt_resume_step="7",
        distopt_nonfinite=None,
        distopt_lr=0.1,  # no option of ours that a host has no flag for
        adam="apex",
        lr=0.2,
    )
    config = config_from_namespace(given, DistOptConfig(lr=0.5, nonfinite="log"))
    assert config == DistOptConfig(lr=0.5, nonfinite="log", adam="torch_foreach", decay="l2", resume_step=7)


def test_namespace_when_it_has_none_of_ours_then_the_config_as_it_is() -> None:
    assert config_from_namespace(Namespace()) == DistOptConfig()
    assert config_from_namespace(Namespace(distopt_adam=None), DistOptConfig(lr=0.5)) == DistOptConfig(lr=0.5)


def test_namespace_when_the_number_is_one_already_then_taken() -> None:
    """Arguments that a host kept in a checkpoint, or that a script wrote."""
    assert config_from_namespace(Namespace(distopt_resume_step=0)).resume_step == 0
    given = Namespace(distopt_async_save=True, distopt_async_buffer_mb=64, distopt_keep_last=3)
    assert config_from_namespace(given) == DistOptConfig(async_save=True, async_buffer_mb=64, keep_last=3)
    given = Namespace(distopt_async_save=False)
    assert not config_from_namespace(given, DistOptConfig(async_save=True)).async_save


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"distopt_resume_step": "soon"}, no_whole_number("soon")),
        ({"distopt_resume_step": 1.5}, no_whole_number("1.5")),
        (
            {"distopt_resume_step": "-3"},
            "Invalid resume_step: -3. Must be at least 0 updates. "
            "Write the iteration at which the checkpoint was saved.",
        ),
        ({"distopt_decay": "none"}, "Invalid decay: 'none'. Must be one of decoupled, l2. Write decay='decoupled'."),
        ({"distopt_async_save": "data"}, no_switch("data")),
        ({"distopt_keep_last": "-2"}, no_keep_last(-2)),
        ({"distopt_checkpoint_format": "none"}, no_format("none")),
    ],
)
def test_namespace_when_a_value_is_bad_then_refused_like_the_option(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_namespace(Namespace(**given))
    assert str(error.value) == text


def test_free_options_when_given_as_texts_then_the_config_has_them_and_is_checked() -> None:
    config = with_free_options(DistOptConfig(lr=0.5), {"resume_step": " 10 ", "decay": "l2"})
    assert config == DistOptConfig(lr=0.5, resume_step=10, decay="l2")
    assert with_free_options(config, {}) == config
    with pytest.raises(ConfigError, match=r"^Invalid nonfinite: 'never'\. "):
        with_free_options(config, {"nonfinite": "never"})


@pytest.mark.parametrize(
    ("environ", "switch"),
    [
        ({}, Switch.ON),
        ({"MEGATRON_DISTOPT": "0"}, Switch.OFF),
        ({"MEGATRON_DISTOPT": "1"}, Switch.ON),
        ({"MEGATRON_DISTOPT": "require"}, Switch.REQUIRE),
    ],
)
def test_switch_when_set_or_not_then_this_member(environ: dict[str, str], switch: Switch) -> None:
    assert switch_from(environ) is switch


@pytest.mark.parametrize(
    ("value", "nearest"),
    [("requires", "require"), ("requir", "require"), ("00", "0"), ("11", "1"), ("off", "1"), ("true", "1"), ("", "1")],
)
def test_switch_when_the_value_is_unknown_then_refused_and_the_nearest_or_the_default_is_named(
    value: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as error:
        switch_from({"MEGATRON_DISTOPT": value})
    text = f"Invalid MEGATRON_DISTOPT: {value!r}. Must be one of 1, 0, require. Write MEGATRON_DISTOPT={nearest!r}."
    assert str(error.value) == text


def test_config_when_imported_alone_then_torch_is_not() -> None:
    """Launchers and command lines check options before anything heavy is loaded."""
    probe = "import sys; import megatron_distopt.config; print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["False", "False"]
