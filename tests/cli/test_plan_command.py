"""`plan` as a command: its flags, its table, what fits into a memory, and refusals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest

from tests.support.plan_command import BUCKET, SIZES, Output, document, refused, run


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


def test_plan_when_memory_is_given_then_only_choices_that_fit_are_shown(capsys: Output) -> None:
    words = (*SIZES, "--dp", 4, "--main-params-dtype", "float32", "remainder")
    kept, smaller = document(capsys, *words, "--memory", 1)["choices"]
    assert kept["peak_nbytes"] > smaller["peak_nbytes"] and kept["fits"] and smaller["fits"]
    limit = smaller["peak_nbytes"] / 2**30
    found = document(capsys, *words, "--memory", limit)["choices"]
    assert [each["fits"] for each in found] == [False, True]
    status, lines, _ = run(capsys, *words, "--memory", limit)
    text = "\n".join(lines)
    assert (status, [row["left"] for row in choices_shown(lines)]) == (0, ["0 B"])
    assert "--distopt-main-params-dtype remainder in a run" in text
    assert "1 choice, of which the nearest lacks" in text
    text = "\n".join(run(capsys, *words, "--memory", 0.0001)[1])
    assert "--tp" in text and "--grad-dtype param" in text and "choices that fit" not in text


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
