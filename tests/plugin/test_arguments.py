"""Our flags in a parser of somebody else's."""

from __future__ import annotations

import argparse

import pytest

from megatron_distopt import DistOptConfig, add_arguments, config_from_arguments
from megatron_distopt.config import FREE_OPTIONS
from megatron_distopt.errors import ConfigError
from megatron_distopt.options import flag_of
from megatron_distopt.plugin.arguments import check_spelling
from tests.support.refusals import says

OURS = ", ".join(map(flag_of, FREE_OPTIONS))


def _parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    return add_arguments(parser).parse_args(words)


def test_flags_when_none_is_given_then_the_config_is_as_it_was() -> None:
    config = DistOptConfig(nonfinite="log", lr=0.5)
    assert config_from_arguments(_parse("--use-distributed-optimizer"), config) == config
    assert config_from_arguments(argparse.Namespace()) == DistOptConfig()


def test_flags_when_given_then_they_say_what_the_config_leaves_open() -> None:
    words = ["--distopt-adam", "torch_foreach", "--distopt-optimizer", "torch.optim:Adagrad"]
    words += ["--distopt-nonfinite", "skip", "--distopt-accelerator", "torch"]
    words += ["--distopt-checkpoint-format", "gathered", "--distopt-async-save"]
    words += ["--distopt-async-buffer-mb", "64", "--distopt-keep-last", "3"]
    words += ["--distopt-overlap-grad-reduce", "--distopt_overlap_param_gather", "yes"]
    words += ["--distopt-bucket-size", "1000000", "--distopt-log-communication", "10"]
    words += ["--distopt-log-digests", "100", "--distopt-digest-file", "/runs/digests", "--distopt-deterministic"]
    words += ["--distopt-reduce-dtype", "bfloat16", "--distopt-shared-memory", "no"]
    config = config_from_arguments(_parse(*words), DistOptConfig(lr=0.5))
    wanted = DistOptConfig(
        adam="torch_foreach",
        optimizer="torch.optim:Adagrad",
        nonfinite="skip",
        accelerator="torch",
        checkpoint_format="gathered",
        async_save=True,
        async_buffer_mb=64,
        keep_last=3,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=1_000_000,
        log_communication=10,
        log_digests=100,
        digest_file="/runs/digests",
        deterministic=True,
        reduce_dtype="bfloat16",
        shared_memory=False,
        lr=0.5,
    )
    assert config == wanted


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
def test_switch_when_alone_or_with_a_word_then_on_or_off(words: tuple[str, ...], is_on: bool) -> None:
    assert config_from_arguments(_parse(*words)).async_save is is_on


def test_flag_when_its_value_is_unknown_then_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_arguments(_parse("--distopt-nonfinite", "skipp"))
    assert says(caught.value, "Invalid nonfinite: 'skipp' ... Write --distopt-nonfinite skip.")


def test_help_when_printed_then_names_every_choice() -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for word in (
        "transformer_engine",
        "deepspeed_cpu",
        "module:Class",
        "(raise, skip, log; default raise)",
        "default auto)",
    ):
        assert word in text


@pytest.mark.parametrize("spelling", ["--distopt-{}", "--distopt_{}"])
def test_flags_when_spelled_with_hyphens_or_underscores_then_the_same(spelling: str) -> None:
    separator = spelling[len("--distopt")]
    words = [spelling.format("decay"), "l2", spelling.format(f"resume{separator}step"), "12"]
    config = config_from_arguments(_parse(*words, f"{spelling.format('adam')}=torch_foreach"))
    assert config == DistOptConfig(decay="l2", resume_step=12, adam="torch_foreach")


def test_flags_when_added_twice_then_once_in_the_parser() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    before = [action.option_strings for action in parser._actions]
    assert add_arguments(parser) is parser
    assert [action.option_strings for action in parser._actions] == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--distopt-resume-step", "later"),
            "Invalid resume_step: 'later' ... Write --distopt-resume-step 10.",
        ),
        (
            ("--distopt_resume_step", "-1"),
            "Invalid resume_step: -1 ... Write --distopt-resume-step 1000, the updates that the checkpoint has seen.",
        ),
        (
            ("--distopt-decay", "L2"),
            "Invalid decay: 'L2' ... Write --distopt-decay l2.",
        ),
        (
            ("--distopt-checkpoint-format", "torch"),
            "Invalid checkpoint_format: 'torch' ... Write --distopt-checkpoint-format distopt.",
        ),
        (
            ("--distopt-async-save", "data"),
            "Invalid async_save: 'data' ... Write --distopt-async-save yes.",
        ),
        (
            ("--distopt-async-buffer-mb", "4GB"),
            "Invalid async_buffer_mb: '4GB' ... Write --distopt-async-buffer-mb 10.",
        ),
        (
            ("--distopt_async_buffer_mb", "0"),
            "Invalid async_buffer_mb: 0 ... Write --distopt-async-buffer-mb 1.",
        ),
        (
            ("--distopt-keep-last", "0"),
            "Invalid keep_last: 0 ... Write --distopt-keep-last 2, or leave it out to keep all.",
        ),
    ],
)
def test_flag_when_its_value_cannot_be_then_refused(words: tuple[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_arguments(_parse(*words))
    assert says(caught.value, text)


def test_help_when_printed_then_names_every_flag_and_its_default() -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for word in (
        *OURS.split(", "),
        "--distopt_resume_step",
        "default decoupled)",
        "default none)",
        "default distopt)",
        "default no)",
        "default 4096)",
    ):
        assert word in text


def _known(*more: str) -> list[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--distributed-timeout-minutes")
    for flag in more:
        parser.add_argument(flag)
    return list(add_arguments(parser)._option_string_actions)


def _names(error: BaseException, flag: str, nearest: str) -> bool:
    """Whether it names the flag, the nearest one, and all that are valid: ours for one of ours, else the host's."""
    valid = OURS if nearest.startswith("--distopt") else nearest
    return says(error, f"Invalid flag: {flag} ... Write {nearest}.") and f"one of {valid}." in str(error)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--distopt-adm", "--distopt-adam"),
        ("--distopt-adm=apex", "--distopt-adam"),
        ("--distopt_optimiser", "--distopt-optimizer"),
        ("--distopt-non-finite", "--distopt-nonfinite"),
        ("--distopt-resumestep", "--distopt-resume-step"),
        ("--distopt-async-safe", "--distopt-async-save"),
        ("--distopt-keeplast", "--distopt-keep-last"),
        ("--distopt-checkpoint-fmt", "--distopt-checkpoint-format"),
        ("--distopt-zzzzzzzzzzzzzzzzzzzzzzzzzzz", "--distopt-adam"),  # like none: the first of all
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
        ("--use_distributed_optimizer", "--use-distributed-optimizer"),
        ("--use-distribute-optimizer", "--use-distributed-optimizer"),
    ],
)
def test_spelling_when_a_word_is_nearly_ours_or_the_hosts_then_refused_with_the_nearest(
    word: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_spelling(["pretrain.py", "--lr", "0.1", word], _known())
    assert _names(caught.value, word.partition("=")[0], nearest)


def test_spelling_when_the_host_spells_with_underscores_then_its_spelling_is_named() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use_distributed_optimizer", action="store_true")
    known = list(add_arguments(parser)._option_string_actions)
    check_spelling(["--use_distributed_optimizer"], known)
    with pytest.raises(ConfigError) as caught:
        check_spelling(["--use-distributed-optimizer"], known)
    assert _names(caught.value, "--use-distributed-optimizer", "--use_distributed_optimizer")


def test_spelling_when_the_host_has_no_such_flag_then_its_usual_spelling_is_named() -> None:
    known = list(add_arguments(argparse.ArgumentParser())._option_string_actions)
    with pytest.raises(ConfigError) as caught:
        check_spelling(["--use-distributed-optimiser"], known)
    assert _names(caught.value, "--use-distributed-optimiser", "--use-distributed-optimizer")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--distopt-adam", "apex", "--distopt_adam=apex", "--use-distributed-optimizer"],
        ["--distopt-resume-step=3", "--distopt_resume_step", "3"],
        ["--distributed-timeout-minutes", "10", "--distributed-backend", "gloo"],  # not ours, known or not
        ["--use-flash-attn", "--optimizer", "sgd", "distopt-adm", "-distopt-adm"],
        ["--", "--lr"],
    ],
)
@pytest.mark.parametrize("abbreviated", [True, False])
def test_spelling_when_words_are_known_or_about_something_else_then_passed(words: list[str], abbreviated: bool) -> None:
    check_spelling(words, _known(), abbreviated=abbreviated)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--distopt-nonf", "--distopt-nonfinite"),
        ("--distopt-resume", "--distopt-resume-step"),
        ("--distopt-keep", "--distopt-keep-last"),
        ("--use-distributed-optim", "--use-distributed-optimizer"),
    ],
)
def test_spelling_when_a_flag_is_abbreviated_then_the_parser_says_whether_it_may(word: str, nearest: str) -> None:
    check_spelling([word], _known())
    check_spelling([f"{word}=skip"], _known(), abbreviated=True)
    with pytest.raises(ConfigError) as caught:
        check_spelling([word], _known(), abbreviated=False)
    assert _names(caught.value, word, nearest)
