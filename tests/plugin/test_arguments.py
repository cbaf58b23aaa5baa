"""Our flags in a parser of somebody else's."""

from __future__ import annotations

import argparse

import pytest

from megatron_distopt import DistOptConfig, add_arguments, config_from_arguments
from megatron_distopt.config import FREE_OPTIONS, OPTIONS
from megatron_distopt.errors import ConfigError
from megatron_distopt.options import flag_of
from megatron_distopt.plugin.arguments import check_spelling


def _parser(*more: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    for flag in more:
        parser.add_argument(flag)
    return add_arguments(parser)


def _parse(*words: str) -> argparse.Namespace:
    return _parser().parse_args(words)


@pytest.mark.parametrize("separator", ["-", "_"])
def test_flags_when_spelled_with_hyphens_or_underscores_then_the_same(separator: str) -> None:
    words = ["--distopt-decay", "l2", "--distopt-resume-step", "12", "--distopt-adam=torch_foreach"]
    spelled = [
        f"--{word[2:].replace('-', separator)}" if word.startswith("--") else word for word in words
    ]
    config = config_from_arguments(_parse(*spelled), DistOptConfig(lr=0.5))
    assert config == DistOptConfig(decay="l2", resume_step=12, adam="torch_foreach", lr=0.5)


@pytest.mark.parametrize(
    ("words", "is_on"),
    [
        (("--distopt-async-save",), True),
        (("--distopt_async_save", "--use-distributed-optimizer"), True),
        (("--distopt-async-save=yes",), True),
        (("--distopt-async-save", "no"), False),
        (("--distopt-async-save", "--distopt-async-save=no"), False),  # behind a script's own flags
    ],
)
def test_switch_when_alone_or_with_a_word_then_on_or_off(
    words: tuple[str, ...], is_on: bool
) -> None:
    assert config_from_arguments(_parse(*words)).async_save is is_on


def test_flag_when_its_value_is_unknown_then_refused_with_the_flag_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_arguments(_parse("--distopt-nonfinite", "skipp"))
    assert all(
        word in str(refused.value) for word in ("--distopt-nonfinite", "'skipp'", "mean skip?")
    )


def test_help_when_printed_then_names_every_flag_its_values_and_its_default() -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for name in FREE_OPTIONS:
        declared = OPTIONS[name]
        words = (
            flag_of(name),
            f"--distopt_{name}",
            f"({declared.values}; default {declared.shown_default})",
        )
        assert all(word in text for word in words), name


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--distopt-adm", "--distopt-adam"),
        ("--distopt-adm=apex", "--distopt-adam"),
        ("--distopt_optimiser", "--distopt-optimizer"),
        ("--distopt-zzzzzzzzzzzzzzzzzzzzzzzzzzz", "--distopt-adam"),  # like none: all are named
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
        ("--use_distributed_optimizer", "--use-distributed-optimizer"),
    ],
)
def test_spelling_when_a_word_is_nearly_ours_or_the_hosts_then_refused_with_the_nearest(
    word: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_spelling(["pretrain.py", "--lr", "0.1", word], [*_parser()._option_string_actions])
    assert word.partition("=")[0] in str(refused.value) and nearest in str(refused.value)


@pytest.mark.parametrize("known", [["--use_distributed_optimizer"], []])
def test_spelling_when_the_host_spells_otherwise_or_has_no_such_flag_then_its_spelling_is_named(
    known: list[str],
) -> None:
    check_spelling(known, known)
    with pytest.raises(ConfigError) as refused:
        check_spelling(["--use-distributed-optimiser"], known)
    assert (known or ["--use-distributed-optimizer"])[0] in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--distopt-adam", "apex", "--distopt_adam=apex", "--use-distributed-optimizer"],
        # not ours, known or not
        ["--distributed-timeout-minutes", "10", "--distributed-backend", "gloo"],
        ["--use-flash-attn", "--optimizer", "sgd", "distopt-adm", "-distopt-adm"],
        ["--", "--lr"],
    ],
)
@pytest.mark.parametrize("abbreviated", [True, False])
def test_spelling_when_words_are_known_or_about_something_else_then_passed(
    words: list[str], abbreviated: bool
) -> None:
    known = [*_parser("--distributed-timeout-minutes")._option_string_actions]
    check_spelling(words, known, abbreviated=abbreviated)


@pytest.mark.parametrize("word", ["--distopt-nonf", "--distopt-resume", "--use-distributed-optim"])
def test_spelling_when_a_flag_is_abbreviated_then_the_parser_says_whether_it_may(word: str) -> None:
    known = [*_parser()._option_string_actions]
    check_spelling([word, f"{word}=skip"], known, abbreviated=True)
    with pytest.raises(ConfigError, match=word):
        check_spelling([word], known, abbreviated=False)
