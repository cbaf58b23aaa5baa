"""`plan` as a command: its flags, its table, what fits into a memory, and refusals."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import pytest

from megatron_distopt.cli import plan_command
from megatron_distopt.cli.plan_model import Choice, ParallelSizes
from tests.support.plan_command import BUCKET, GPT, SIZES, Output, document, refused, run


def choices_shown(lines: Sequence[str]) -> list[dict[str, str]]:
    """The table of choices, by title."""
    first = next(number for number, line in enumerate(lines) if line.startswith("choices")) + 1
    titles, *rows = (
        re.split(r"\s{2,}", line.strip()) for line in itertools.takewhile(str.strip, lines[first:])
    )
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_plan_when_one_choice_is_asked_for_then_its_table_and_its_step(capsys: Output) -> None:
    status, lines, err = run(capsys, *SIZES, "--dp", 2, "--bucket-size", BUCKET)
    assert (status, err) == (0, "")
    (choice,) = choices_shown(lines)
    wanted = {
        "dp": "2",
        "dtype": "bf16",
        "bucket": "30,000",
        "params": "167.0 KiB",
        "all": "999.8 KiB",
    }
    assert wanted.items() <= choice.items()
    assert choice["sent"] == "250.5 KiB"
    text = "\n".join(lines)
    for part in (
        "layers 4, hidden 40",
        "3 that send 167.0 KiB",
        "3 that send 83.5 KiB",
        "1 that send 24 B",
    ):
        assert part in text


def test_plan_when_flags_have_several_values_then_all_combinations(capsys: Output) -> None:
    found = document(capsys, *SIZES, "--ranks", 16, 32, "--tp", 1, 2, "--dtype", "bf16", "fp32")
    rows = [(each["ranks"], each["dp"], each["tp"], each["dtype"]) for each in found["choices"]]
    assert rows == [
        (ranks, ranks // tp, tp, dtype)
        for ranks in (16, 32)
        for tp in (1, 2)
        for dtype in ("bf16", "fp32")
    ]


def test_plan_when_grads_are_rounded_on_their_way_then_an_element_sends_4_bytes_and_not_6(
    capsys: Output,
) -> None:
    words = ("--dp", 4, "--bucket-size", BUCKET, "--reduce-dtype", "none", "bfloat16", "float16")
    found = document(capsys, *SIZES, *words)["choices"]
    stages = [stage for choice in found for stage in choice["stages"]]
    # bf16 params; three ranks get a quarter each
    shares = stages[0]["bytes"]["param_nbytes"] // 2 * 3 // 4
    assert [stage["collectives"]["reduce-scatter"]["nbytes"] for stage in stages] == [
        4 * shares,
        2 * shares,
        2 * shares,
    ]
    assert {stage["collectives"]["all-gather"]["nbytes"] for stage in stages} == {2 * shares}


def test_plan_when_grads_are_sent_in_8_bits_then_it_says_below_which_bandwidth_that_takes_less_time(
    capsys: Output,
) -> None:
    words = (*SIZES, "--dp", 2, "--bucket-size", BUCKET)
    _, lines, _ = run(capsys, *words, "--reduce-dtype", "none", "int8")
    stage = plan_command.plan_stage(
        GPT, Choice(ParallelSizes(2), reduce_dtype="int8", bucket_size=BUCKET), 0
    )
    for where in ("a core", "an H200"):
        [line] = [line.replace(",", "") for line in lines if line.strip().startswith(where)]
        rates = dict(
            zip(
                ("float32", "bfloat16"),
                map(float, re.findall(r"([\d.]+) Gbit/s", line)),
                strict=True,
            )
        )
        for name, rate in rates.items():
            slower, faster = (
                plan_command.seconds_at(rate * factor, stage, where) for factor in (0.9, 1.1)
            )
            assert slower["int8"] < slower[name] and faster["int8"] > faster[name]
        # Half of the elements in 4, 2 and 1 bytes of 8 ns each.
        one, none = (plan_command.seconds_at(gigabits, stage, where) for gigabits in (1, math.inf))
        for name, nbytes in {"float32": 4, "bfloat16": 2, "int8": 1}.items():
            # padding
            assert one[name] - none[name] == pytest.approx(
                nbytes * 8e-9 * stage.numel / 2, rel=0.01
            )
    assert "pay below" not in "\n".join(run(capsys, *words, "--reduce-dtype", "bfloat16")[1])
    assert "pay below" not in "\n".join(run(capsys, *SIZES, "--dp", 1, "--reduce-dtype", "int8")[1])


def test_memory_when_short_then_remainders_before_the_host_before_rounded_moments(
    capsys: Output,
) -> None:
    words = (*SIZES, "--dp", 4, "--offload-fraction", 0, 0.5)
    found = document(capsys, *words, "--memory", 1)["choices"]
    peaks = {
        (each["main_params_dtype"], each["exp_avg_dtype"], each["offload_fraction"]): each
        for each in found
    }
    limit = peaks["remainder", "float32", 0]["peak_nbytes"]
    status, lines, _ = run(capsys, *words, "--memory", limit / 2**30)
    shown = [(row["state"], row["on host"]) for row in choices_shown(lines)]
    assert status == 0
    assert shown[:4] == [
        ("main remainder", "0"),
        ("float32", "0.5"),
        ("main remainder", "0.5"),
        ("moments bfloat16", "0"),
    ]
    assert "--distopt-main-params-dtype remainder in a run" in "\n".join(lines)
    assert "1 choice, of which the nearest lacks" in "\n".join(lines)
    assert [
        each["fits"] for each in document(capsys, *words, "--memory", limit / 2**30)["choices"]
    ].count(False) == 1
    text = "\n".join(run(capsys, *words, "--memory", 0.0001)[1])
    assert "--tp" in text and "--grad-dtype param" in text and "choices that fit" not in text


def test_plan_when_protection_is_asked_for_then_bytes_and_lost_hours_are_those_of_the_formula(
    capsys: Output,
) -> None:
    words = (
        *SIZES,
        "--dp",
        16,
        "--protect-every",
        10,
        "--step-seconds",
        36,
        "--save-interval",
        200,
        "--mtbf",
        720,
    )
    for dtype in ("bf16", "fp32"):
        [choice] = document(capsys, *words, "--dtype", dtype)["choices"]
        [stage], found = choice["stages"], choice["protection"]
        # counters and padding
        assert found["snapshot_nbytes"] == pytest.approx(12 * stage["numel"] / 16, rel=0.02)
        assert found["node_nbytes"] == 2 * 2 * 8 * found["snapshot_nbytes"]
        assert (found["nodes"], found["failures"]) == (2, 2.0)
        # Half of 10 steps are 180 s, of 200 steps 3,600 s.
        assert found["lost_hours"] == pytest.approx(2 * (180 + 120) / 3600)
        assert found["lost_hours_from_disk"] == pytest.approx(2 * (3600 + 120) / 3600)
    text = "\n".join(run(capsys, *words)[1])
    assert (
        "protection every 10 steps" in text and "0.17 h a month" in text and "too long" not in text
    )
    assert "too long" in "\n".join(run(capsys, *words, "--step-seconds", 1e-7)[1])


REFUSALS: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
    (("--layers", 4, "--vocab", 128), ("no hidden", "--hidden N")),
    ((*SIZES, "--pp", 3), ("4 (layers)", "--pp 3")),
    ((*SIZES, "--heads", 4, "--tp", 8), ("4 (heads)", "--tp 8")),
    ((*SIZES, "--heads", 3, "--kv-heads", 1), ("hidden size 40", "3 heads", "--head-dim")),
    ((*SIZES, "--ep", 2, "--dp", 2), ("--ep is 2", "--experts N")),
    ((*SIZES, "--ranks", 12, "--tp", 8), ("--ranks 12", "tp 8", "--dp N")),
    (
        (*SIZES, "--dp", 64, "--bucket-size", 63),
        ("63 elements", "64 ranks", "--bucket-size 40000000"),
    ),
    (
        (*SIZES, "--grad-dtype", "fp32", "param", "--reduce-dtype", "bfloat16"),
        ("kept in bf16", "reduce_dtype="),
    ),
    ((*SIZES, "--dtype", "fp16", "--main-params-dtype", "remainder"), ("remainder", "float32")),
    ((*SIZES, "--offload-fraction", 50), ("offload_fraction is 50", "from 0 to 1")),
    (
        (*SIZES, "--offload-fraction", 0.5, "--dtype", "fp32"),
        ("--dtype fp32", "offload_fraction=0.5", "bf16"),
    ),
    ((*SIZES, "--dp", 16, "--protect-every", 10), ("--step-seconds S",)),
    ((*SIZES, "--dp", 16, "--mtbf", 100), ("--protect-every K",)),
    (
        (*SIZES, "--dp", 8, "--protect-every", 10, "--step-seconds", 1),
        ("8 ranks", "--ranks-per-node N"),
    ),
]


@pytest.mark.parametrize(("words", "named"), REFUSALS)
def test_plan_when_something_does_not_fit_then_it_says_what_to_write(
    words: tuple[object, ...], named: tuple[str, ...], capsys: Output
) -> None:
    text = refused(capsys, *words)
    assert [part for part in named if part not in text] == []


@pytest.mark.parametrize(
    ("numel", "words"),
    [
        (
            8_030_261_248,
            "--llama --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256",
        ),
        (
            2_506_172_416,
            "--llama --tied --layers 18 --hidden 2048 --heads 8 --kv-heads 1 --head-dim 256 --ffn "
            "16384 --vocab 256000",
        ),
        (124_439_808 + (50304 - 50257) * 768, "--layers 12 --hidden 768 --vocab 50257 --seq 1024"),
    ],
    ids=["Llama 3 8B", "Gemma 2B", "GPT-2, whose vocabulary Megatron pads"],
)
def test_plan_when_a_models_size_is_known_then_it_has_as_many_params(
    numel: int, words: str, capsys: Output
) -> None:
    """The sums of the shapes that the files of these models hold."""
    assert document(capsys, *words.split())["choices"][0]["stages"][0]["numel"] == numel
