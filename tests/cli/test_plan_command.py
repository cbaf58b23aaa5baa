"""`plan` as a command: its flags, its table, what fits into a memory, and refusals."""

from __future__ import annotations

import re

import pytest

from tests.support.plan_command import BUCKET, SIZES, Output, document, refused, run


def test_plan_when_it_is_asked_then_a_row_for_each_kind_of_stage(capsys: Output) -> None:
    status, lines, err = run(capsys, *SIZES, "--dp", 2, "--pp", 4, "--bucket-size", BUCKET)
    assert (status, err) == (0, "")
    assert "layers 4, hidden 40" in "\n".join(lines)
    first = lines.index("bytes of a rank") + 1
    titles, *rows = (re.split(r"\s{2,}", line.strip()) for line in lines[first:])
    assert [row[0] for row in rows] == ["0", "1-2", "3"]
    assert titles[:3] == ["stage", "params", "grads"]


def test_plan_when_a_choice_is_known_then_bytes_are_those_of_its_parts(capsys: Output) -> None:
    status, lines, _ = run(capsys, *SIZES, "--dp", 2, "--bucket-size", BUCKET)
    table = lines[lines.index("bytes of a rank") + 1 :]
    titles, row = (re.split(r"\s{2,}", line.strip()) for line in table)
    shown = dict(zip(titles, row, strict=True))
    wanted = {
        "params": "167.0 KiB",
        "all": "999.8 KiB",
        "reduce-scatter sends": "167.0 KiB",
        "all-gather sends": "83.5 KiB",
        "all-reduce sends": "24 B",
        "buckets": "3",
    }
    assert status == 0
    assert wanted.items() <= shown.items()


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_plan_when_grads_are_rounded_on_their_way_then_an_element_sends_4_bytes_and_not_6(
    form: str, capsys: Output
) -> None:
    words = (*SIZES, "--dp", 4, "--bucket-size", BUCKET)
    wide = document(capsys, *words)["stages"][0]["nbytes"]
    short = document(capsys, *words, "--reduce-dtype", form)["stages"][0]["nbytes"]
    # bf16 params; three ranks get a quarter each
    share = wide["params"] // 2 * 3 // 4
    assert wide["reduce-scatter sends"] == 4 * share
    assert short["reduce-scatter sends"] == 2 * share
    assert wide["all-gather sends"] == short["all-gather sends"] == 2 * share


def test_plan_when_memory_is_given_then_it_says_what_fits_and_how_many_ranks_would(
    capsys: Output,
) -> None:
    words = ("--llama", "--layers", 32, "--hidden", 4096, "--vocab", 32000, "--tp", 2)
    found = document(capsys, *words, "--dp", 1, "--memory", 40)
    assert not found["fits"] and found["peak_nbytes"] > 40 << 30
    dp = found["ranks_needed"] // 2
    enough = document(capsys, *words, "--dp", dp, "--memory", 40)
    assert enough["fits"] and enough["peak_nbytes"] <= 40 << 30
    fewer = document(capsys, *words, "--dp", dp // 2, "--memory", 40)
    assert not fewer["fits"] and fewer["ranks_needed"] == 2 * dp
    text = "\n".join(run(capsys, *words, "--dp", dp, "--memory", 40)[1])
    assert f"{2 * dp}: dp {dp}, tp 2, pp 1" in text and "are left for activations" in text
    status, lines, _ = run(capsys, *words, "--memory", 1)
    text = "\n".join(lines)
    assert status == 0
    assert "are missing" in text and "--tp" in text and "--grad-dtype param" in text


REFUSALS: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
    (("--layers", 4, "--vocab", 128), ("--hidden is missing", "--hidden N")),
    ((*SIZES, "--pp", 3), ("4 (layers)", "--pp 3")),
    ((*SIZES, "--heads", 4, "--tp", 8), ("4 (heads)", "--tp 8")),
    ((*SIZES, "--heads", 3, "--kv-heads", 1), ("hidden size 40", "3 heads", "--head-dim")),
    ((*SIZES, "--ep", 2, "--dp", 2), ("--ep is 2", "--experts N")),
    (
        (*SIZES, "--dp", 64, "--bucket-size", 63),
        ("63 elements", "64 ranks", "--bucket-size 40000000"),
    ),
    (
        (*SIZES, "--grad-dtype", "param", "--reduce-dtype", "bfloat16"),
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
    assert document(capsys, *words.split())["stages"][0]["numel"] == numel
