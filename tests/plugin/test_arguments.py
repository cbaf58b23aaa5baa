"""Our flags in a parser of somebody else's."""

from __future__ import annotations

import argparse

import pytest

from megatron_distopt import DistOptConfig, add_arguments, config_from_arguments
from megatron_distopt.errors import ConfigError


def _parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    return add_arguments(parser).parse_args(words)


def test_flags_when_none_is_given_then_the_config_is_as_it_was() -> None:
    config = DistOptConfig(nonfinite="log", lr=0.5)
    assert config_from_arguments(_parse("--use-distributed-optimizer"), config) == config
    assert config_from_arguments(argparse.Namespace()) == DistOptConfig()


def test_flags_when_given_then_override_the_config() -> None:
    words = ["--distopt-adam", "torch_foreach", "--distopt-optimizer", "torch.optim:Adagrad"]
    words += ["--distopt-nonfinite", "skip", "--distopt-accelerator", "torch"]
    config = config_from_arguments(_parse(*words), DistOptConfig(lr=0.5))
    wanted = DistOptConfig(
        adam="torch_foreach", optimizer="torch.optim:Adagrad", nonfinite="skip", accelerator="torch", lr=0.5
    )
    assert config == wanted


def test_flag_when_its_value_is_unknown_then_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_arguments(_parse("--distopt-nonfinite", "skipp"))
    assert str(caught.value) == "Invalid nonfinite: 'skipp'. Must be one of raise, skip, log. Write nonfinite='skip'."


def test_help_when_printed_then_names_every_choice() -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for word in ("transformer_engine", "deepspeed_cpu", "module:Class", "raise, skip, log", "(auto)"):
        assert word in text
