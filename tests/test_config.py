"""Every option, what it refuses, and what flags and environment variables may say: tables derived
from OPTIONS."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
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
from megatron_distopt.options import flag_of, variable_of

#: The float64 numbers next to the bounds of a loss scale.
ABOVE_LARGEST = math.nextafter(2.0**127, math.inf)
BELOW_SMALLEST = math.nextafter(2.0**-126, 0.0)
#: By option, a value that is not its default. Of the others `_other` finds one by their type.
OTHER_VALUES: dict[str, Any] = {
    "adam": "torch_foreach",
    "optimizer": "sgd",
    "betas": (0.8, 0.9),
    "loss_scale": "dynamic",
    "min_loss_scale": 0.5,
    "offload_fraction": 0.5,
    "ema_decay": 0.999,
    "protect_folder": "/dev/shm/run",
    "overlap_grad_reduce": True,
}


def _other(name: str) -> Any:
    option = OPTIONS[name]
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if option.is_switch:
        return not option.default
    if "int" in option.annotation:
        return (option.default or 0) + 7  # type: ignore[operator]
    if option.annotation == "float":
        return option.default * 2 + 0.25  # type: ignore[operator]
    return next(word for word in option.rule.words if word != option.default)  # type: ignore[union-attr]


def _text(value: object) -> str:
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


def _wrong(name: str) -> list[Any]:
    """Values that an option does not take: of other types, and beyond its range."""
    option, values = OPTIONS[name], list[Any]()
    if option.is_switch:
        values += ["no", 1, np.True_]
    elif "int" in option.annotation:
        values += ["4e7", 1.5, True, math.nan, -1, np.float32(8)]
    elif option.annotation == "float":
        values += ["3e-4", True, None, torch.tensor(0.25), 10**400, math.nan, math.inf, -1.0]
    elif option.annotation.startswith("str"):
        values += [3, torch.bfloat16] if option.rule is None else [3, torch.bfloat16, "", "Nosuch"]
    return values if option.annotation.endswith("None") else [*values, None]


SPECIAL: list[tuple[str, Any]] = [
    *(
        ("optimizer", name)
        for name in ("torch.optim.Adagrad", ":Adagrad", "torch.optim:", "torch..optim:Adagrad")
    ),
    *(
        ("optimizer", name)
        for name in ("torch.optim:Adagrad:Adagrad", "torch.optim: Adagrad", "torch.2optim:Adagrad")
    ),
    *(("optimizer", name) for name in ("torch.optim:Adagrad\n", torch.optim.SGD)),
    *(
        ("betas", betas)
        for betas in ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (), (0.9,), 0.9, ("0.9", "0.95"))
    ),
    *(
        ("loss_scale", scale)
        for scale in (0.0, -8.0, math.inf, math.nan, 2.0**128, ABOVE_LARGEST, BELOW_SMALLEST)
    ),
    *(("loss_scale", scale) for scale in ("static", "1024.0", True)),
    ("min_loss_scale", BELOW_SMALLEST),
    ("min_loss_scale", 2.0**17),  # above the initial one
    ("initial_loss_scale", ABOVE_LARGEST),
    ("offload_fraction", 1.5),
    ("muon_ns_steps", 0),
    ("nonfinite", NonFinitePolicy.SKIP),
]
WRONG = [(name, value) for name in OPTIONS for value in _wrong(name)] + SPECIAL


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda each: str(each)[:30])
def test_config_when_an_option_does_not_take_a_value_then_refused_with_its_name(
    name: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as refused:
        DistOptConfig(**{name: value})
    text = str(refused.value)
    assert name in text and repr(value)[:60] in text
    assert len(text) < 400


@pytest.mark.parametrize(
    "options",
    [
        *({name: _other(name)} for name in OPTIONS),
        *({"adam": source} for source in ADAM_SOURCES),
        *({"nonfinite": policy.value} for policy in NonFinitePolicy),
        *(
            {"optimizer": name}
            for name in ("muon", "torch.optim:Adagrad", "module:Class", "_my2.lion_3:_Lion4")
        ),
        {"lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "betas": (0.0, 0.0), "momentum": 0.0},
        *({"loss_scale": scale} for scale in (1024, 2**127, 2.0**127, 2.0**-126)),
        {"loss_scale": "dynamic", "min_loss_scale": 2.0**-126, "initial_loss_scale": 2.0**127},
        {"min_loss_scale": 2.0, "initial_loss_scale": 2.0, "hysteresis": 1, "growth_interval": 1},
        *({"resume_step": step} for step in (None, 0, 10**9)),
        {"bucket_size": 1, "muon_ns_steps": 1},
        {"offload_fraction": 0.0},
        {"offload_fraction": 1.0},
    ],
    ids=str,
)
def test_config_when_values_are_at_the_border_then_accepted(options: dict[str, Any]) -> None:
    config = DistOptConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


def test_config_when_written_to_or_given_by_position_then_refused() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DistOptConfig().lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        DistOptConfig("adam")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="hysteresis"):
        dataclasses.replace(DistOptConfig(), hysteresis=0)


def test_config_when_numbers_are_numpys_then_pythons_own_of_the_same_value() -> None:
    """Or two ranks of which one wrote 0.1 and one np.float64(0.1) would seem to disagree."""
    config = DistOptConfig(
        lr=np.float32(0.5), eps=np.float64(0.25), hysteresis=np.int64(3), betas=[np.float16(0.5), 0]
    )  # type: ignore[arg-type]
    plain = DistOptConfig(lr=0.5, eps=0.25, hysteresis=3, betas=(0.5, 0.0))
    assert config == plain
    assert config.described() == plain.described()


@pytest.mark.parametrize(
    "make", [DistOptConfig, lambda **given: with_options(DistOptConfig(), given)]
)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("clip_gard", "clip_grad?"),
        ("Overlap_Grad_Reduce", "overlap_grad_reduce?"),
        ("bucket_sizes", "bucket_size?"),
        ("zzz", "help(megatron_distopt.DistOptConfig)"),
    ],
)
def test_config_when_an_option_does_not_exist_then_refused_with_the_nearest(
    make: Callable[..., object], name: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**{name: 1})
    assert repr(name) in str(refused.value) and meant in str(refused.value)


# --- flags and variables


@pytest.mark.parametrize("name", FREE_OPTIONS)
def test_option_when_code_flag_and_variable_say_something_then_code_wins_then_the_flag(
    name: str,
) -> None:
    default = getattr(DistOptConfig(), name)
    variables = {
        variable_of(name): _text(_other(name)),
        "MEGATRON_PATH": "not ours",
        "MEGATRON_DISTOPT": "require",
    }
    # a host has those
    flags = Namespace(**{f"distopt_{name}": _text(_other(name)), "distopt_lr": 0.1, "lr": 0.2})
    in_code = DistOptConfig(**{name: default}, lr=0.5)
    assert (
        config_from_environment(variables)
        == config_from_arguments(flags)
        == DistOptConfig(**{name: _other(name)})
    )
    assert config_from_environment(variables, config_from_arguments(flags, in_code)) == in_code
    assert (
        getattr(
            config_from_environment(variables, with_options(DistOptConfig(), {name: default})), name
        )
        == default
    )
    if default is not None:  # what a flag says, be it the default, stands before the variable
        said = config_from_arguments(Namespace(**{f"distopt_{name}": _text(default)}))
        assert getattr(config_from_environment(variables, said), name) == default


@pytest.mark.parametrize("name", FREE_OPTIONS)
def test_text_when_an_option_does_not_take_it_then_refused_as_it_was_spelled(name: str) -> None:
    option = OPTIONS[name]
    if option.rule is None and not option.is_switch:
        return  # any text is a name of a file
    texts = [
        "",
        "no such",
        "auto"
        if option.default is not None and name not in ("adam", "accelerator", "updates")
        else "none?",
    ]
    texts += ["1e3", "1.5", "40MB", "-1"] if "int" in option.annotation else []
    for text in texts:
        with pytest.raises(ConfigError) as refused:
            config_from_environment({variable_of(name): text})
        assert variable_of(name) in str(refused.value)
        with pytest.raises(ConfigError) as refused:
            config_from_arguments(Namespace(**{f"distopt_{name}": text}))
        assert flag_of(name) in str(refused.value)
        # What code gave is not overridden, so the text is not looked at.
        assert config_from_environment(
            {variable_of(name): text}, DistOptConfig(**{name: option.default})
        )


def test_switch_when_set_then_every_usual_word_is_taken_and_auto_where_it_can_be_left_to_us() -> (
    None
):
    for words, is_on in (
        (("1", "true", "Yes", "on", "ON"), True),
        (("0", "false", "no", "NO", "off"), False),
    ):
        for word in words:
            # off, on, and left to us by default
            names = ("ASYNC_SAVE", "SHARED_MEMORY", "OVERLAP_GRAD_REDUCE")
            config = config_from_environment({f"MEGATRON_DISTOPT_{name}": word for name in names})
            assert (config.async_save, config.shared_memory, config.overlap_grad_reduce) == (
                is_on,
            ) * 3
    assert (
        config_from_environment(
            {"MEGATRON_DISTOPT_OVERLAP_GRAD_REDUCE": "Auto"}
        ).overlap_grad_reduce
        is None
    )
    assert (
        config_from_arguments(Namespace(distopt_async_save=True, distopt_bucket_size=3)).async_save
        is True
    )


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MEGATRON_DISTOPT_ADAN", "MEGATRON_DISTOPT_ADAM?"),
        ("MEGATRON_DISTOPT_NON_FINITE", "MEGATRON_DISTOPT_NONFINITE?"),
        ("MEGATRON_DISTOPT_BUCKET_SIZES", "MEGATRON_DISTOPT_BUCKET_SIZE?"),
        # Nothing like any of ours but for the prefix.
        ("MEGATRON_DISTOPT_LR", "Unset it."),
        ("MEGATRON_DISTOPT_", "Unset it."),
        ("MEGATRON_DISTOPT_" + "Z" * 40, "Unset it."),
    ],
)
def test_environment_when_a_variable_is_unknown_then_refused_with_the_valid_ones_and_the_nearest(
    variable: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_environment({variable: "1"})
    assert str(refused.value).endswith(meant)
    assert all(word in str(refused.value) for word in (variable, *map(variable_of, FREE_OPTIONS)))


def test_explicit_when_replaced_copied_or_pickled_then_it_stays() -> None:
    config = DistOptConfig(adam="auto", lr=0.5)
    assert config.explicit == {"adam", "lr"}
    assert dataclasses.replace(config, clip_grad=1.0).explicit == {"adam", "lr", "clip_grad"}
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (other, other.explicit) == (config, config.explicit)
    assert DistOptConfig().explicit == frozenset()
    assert DistOptConfig(lr=1e-3) == DistOptConfig()


SWITCH_WORDS = {
    Switch.ON: ("1", "yes", "true", "on", "True"),
    Switch.OFF: ("0", "no", "false", "off", "OFF"),
    Switch.REQUIRE: ("require", "Require"),
}


def test_presence_when_set_or_not_then_this_member() -> None:
    assert switch_from({}) is Switch.ON
    for switch, words in SWITCH_WORDS.items():
        assert {switch_from({"MEGATRON_DISTOPT": word}) for word in words} == {switch}
    for word in ("requires", "00", "2", ""):
        with pytest.raises(ConfigError, match="require"):
            switch_from({"MEGATRON_DISTOPT": word})


def test_declarations_when_read_then_options_are_in_help_and_have_flag_and_variable() -> None:
    assert [field.name for field in dataclasses.fields(DistOptConfig)] == [*OPTIONS, "explicit"]
    for name, declared in OPTIONS.items():
        assert f"{name}: {declared.meaning}." in str(DistOptConfig.__doc__)
        assert declared.default == getattr(DistOptConfig(), name)
        assert (name in FREE_OPTIONS) == (not declared.by_host)
    assert (flag_of("async_save"), variable_of("async_save")) == (
        "--distopt-async-save",
        "MEGATRON_DISTOPT_ASYNC_SAVE",
    )
