"""`plan` as a command: its flags, its texts, its pictures and its refusals."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from megatron_distopt.cli import main as cli
from megatron_distopt.cli.plan_model import ParallelSizes, stage_params
from megatron_distopt.layout import default_bucket_size
from tests.support.plan_command import BUCKET, GPT, SIZES, Output, document, refused, run
from tests.support.refusals import Said


def test_plan_when_one_choice_is_asked_for_then_everything_in_one_look(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_width", lambda: 110)
    words = ("--dp", 2, "--bucket-size", BUCKET, "--bandwidth", 0.01, "--backward-ms", 500, "--update-ms", 2)
    status, lines, err = run(capsys, "--config", config, *words)
    assert (status, err) == (0, "")
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 110
    (choice,) = choices_shown(lines)
    wanted = {"dp": "2", "dtype": "bf16", "bucket": "30,000", "params": "167.0 KiB", "all": "999.8 KiB"}
    assert wanted.items() <= choice.items()
    assert (choice["sent"], choice["exposed"]) == ("250.5 KiB", "46.1 ms")
    for said in (
        "4 layers, hidden 40, 4 heads",
        "128; tied",
        "16 learned positions, biases, LayerNorm",
        "0.01 Gbit/s a rank, and 0 a message",
        "500 ms a microbatch, forward 250 ms",
        "2 ms on the device",
        "52 tensors, 84,720 elements, params 167.0 KiB, grads 334.0 KiB",
        "3 that send 167.0 KiB in 137 ms; backward can hide 106 ms (78%)",
        "3 that send 83.5 KiB in 68.4 ms; the next forward can hide 53 ms (78%)",
        "1 that send 24 B in 19.2 us",
        "12.5 KiB in backward",
        "18 flat params",
    ):
        assert said in text


def test_plan_when_the_terminal_is_narrow_then_no_line_is_wider(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_width", lambda: 80)
    for sizes in ((2,), (2, 64)):
        words = ("--dp", *sizes, "--bucket-size", BUCKET, "--backward-ms", 500, "--rank", 0)
        _, lines, _ = run(capsys, "--config", config, *words)
        assert max(map(len, lines)) <= 80
        assert "exposed" in "\n".join(lines)


def test_plan_when_flags_have_several_values_then_all_combinations(config: Path, capsys: Output) -> None:
    found = document(capsys, "--config", config, "--ranks", 16, 32, "--tp", 1, 2, "--dtype", "bf16", "fp32")
    rows = [(each["ranks"], each["dp"], each["tp"], each["dtype"]) for each in found["choices"]]
    assert rows == [
        (ranks, ranks // tp, tp, dtype) for ranks in (16, 32) for tp in (1, 2) for dtype in ("bf16", "fp32")
    ]


def sent_by(choice: Mapping[str, Any], kind: str) -> int:
    (stage,) = choice["stages"]
    return int(stage["collectives"][kind]["sent_nbytes"])


def test_plan_when_grads_are_rounded_on_their_way_then_an_element_sends_4_bytes_and_not_6(
    config: Path, capsys: Output
) -> None:
    words = ("--dp", 4, "--bucket-size", BUCKET, "--reduce-dtype", "none", "bfloat16", "float16")
    plain, *rounded = document(capsys, "--config", config, *words)["choices"]
    (stage,) = plain["stages"]
    shares = stage["bytes"]["param_nbytes"] // 2 * 3 // 4  # bf16 params; three ranks get a quarter each
    assert (plain["reduce_dtype"], sent_by(plain, "reduce-scatter")) == (None, 4 * shares)
    assert sent_by(plain, "all-gather") == 2 * shares
    for each, dtype in zip(rounded, ("bfloat16", "float16"), strict=True):
        assert (each["reduce_dtype"], sent_by(each, "reduce-scatter")) == (dtype, 2 * shares)
        assert sent_by(each, "all-gather") == 2 * shares
        assert each["stages"][0]["bytes"] == stage["bytes"]
        assert each["seconds"]["reduce_scatter"] == pytest.approx(plain["seconds"]["reduce_scatter"] / 2)


def test_plan_when_sizes_of_buckets_are_words_then_they_are_compared_with_numbers(config: Path, capsys: Output) -> None:
    words = ("--hidden", 400, "--dp", 2, "--bucket-size", "all", "auto", BUCKET)
    found = document(capsys, "--config", config, *words)["choices"]
    assert [each["bucket_size"] for each in found] == [None, "auto", BUCKET]
    numel = found[0]["stages"][0]["numel"]
    one, automatic, many = (each["stages"][0]["buckets"] for each in found)
    assert 1 == one < automatic <= -(-numel // default_bucket_size(numel, 2)) < many
    _, lines, _ = run(capsys, "--config", config, *words)
    assert [row["bucket"] for row in choices_shown(lines)] == ["all", "auto", f"{BUCKET:,}"]


def choices_shown(lines: Sequence[str]) -> list[dict[str, str]]:
    """The table of choices, by title."""
    first = next(number for number, line in enumerate(lines) if line.startswith("choices")) + 1
    titles, *rows = (re.split(r"\s{2,}", line.strip()) for line in itertools.takewhile(str.strip, lines[first:]))
    return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("words", "title", "shown"),
    [
        (("--rotary", "--pp", 2), "stage", ["1"]),  # the final norm
        (("--rotary", "--pp", 1, 2), "stage", ["0", "1"]),
        (("--pp", 1, 2), "stage", None),
        (("--bucket-size", 1), "bucket", ["1"]),
        (("--bucket-size", "all"), "bucket", None),
        (("--experts", 4, "--dp", 2, "--ep", 1, 2), "ep", ["1", "2"]),
        (("--experts", 4, "--dp", 2, "--ep", 1), "ep", None),
        (("--reduce-dtype", "none", "float16"), "reduce dtype", ["none", "float16"]),
        (("--reduce-dtype", "float16"), "reduce dtype", ["float16"]),
        (("--reduce-dtype", "none"), "reduce dtype", None),
    ],
)
def test_plan_when_a_column_says_more_than_what_is_usual_then_it_is_shown(
    words: tuple[object, ...], title: str, shown: list[str] | None, config: Path, capsys: Output
) -> None:
    rows = choices_shown(run(capsys, "--config", config, *words)[1])
    assert ([row[title] for row in rows] if title in rows[0] else None) == shown


def test_plan_when_sizes_are_given_then_they_override_the_config(config: Path, capsys: Output) -> None:
    found = document(capsys, "--config", config, "--hidden", 80, "--vocab", 1000, "--gated", "--rotary")
    model = found["model"]
    assert (model["hidden"], model["vocab"], model["vocab_multiple"]) == (80, 1000, 128)
    assert (model["is_gated"], model["positions"], model["layers"]) == (True, 0, 4)


def test_plan_when_stages_differ_then_each_kind_is_told_once(config: Path, capsys: Output) -> None:
    (choice,) = document(capsys, "--config", config, "--pp", 4)["choices"]
    assert [stage["stages"] for stage in choice["stages"]] == [[0], [1, 2], [3]]
    embedding, layer = 128 * 40, stage_params(GPT, ParallelSizes(dp=1, pp=4), 1, "float32")
    numels = [stage["numel"] for stage in choice["stages"]]
    middle = sum(param.spec.numel for param in layer)
    assert numels == [middle + embedding + 16 * 40, middle, middle + 2 * 40 + embedding]


def test_plan_when_tokens_per_second_are_given_then_two_thirds_are_backward(config: Path, capsys: Output) -> None:
    words = ("--tokens-per-second", 1000, "--seq", 300, "--micro-batch", 2)
    assert document(capsys, "--config", config, *words)["assumed"]["backward_seconds"] == pytest.approx(0.4)


def test_plan_when_a_rank_is_built_then_it_says_where_and_that_all_is_as_planned(config: Path, capsys: Output) -> None:
    words = ("--config", config, "--dp", 4, "--tp", 2, "--pp", 2, "--rank", 13)
    _, lines, _ = run(capsys, *words)
    assert "built without memory: rank 13 of 16 (stage 1, data-parallel rank 2 of 4)" in lines
    assert sum(line.endswith(": as planned") for line in lines) == 4
    assert "  groups        torch's fake process group of 16 ranks, data-parallel ones of 4" in lines
    (built,) = document(capsys, *words)["built"]
    assert built["built"]["main_nbytes"] == built["planned"]["main_nbytes"] > 0


def test_plan_when_it_builds_nothing_then_torch_is_not_imported() -> None:
    probe = (
        "import sys; from megatron_distopt.cli.main import main; "
        "assert main(['plan', '--layers', '2', '--hidden', '64', '--vocab', '128']) == 0; "
        "sys.exit(str([name for name in ('torch', 'matplotlib') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == "[]\n"


def test_plot_when_asked_for_then_a_picture_of_every_choice(config: Path, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    sizes = []
    for number, choices in enumerate(((2,), (2, 4, 8))):
        file = tmp_path / f"{number}.png"
        words = ("--dp", *choices, "--bucket-size", BUCKET, "--bandwidth", 0.1, "--backward-ms", 20, "--plot", file)
        assert run(capsys, "--config", config, *words)[0] == 0
        data = file.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(int.from_bytes(data[20:24], "big"))  # height in pixels
    assert sizes[1] > sizes[0]


def test_plot_when_one_choice_takes_no_time_then_the_others_are_drawn(
    config: Path, tmp_path: Path, capsys: Output
) -> None:
    pytest.importorskip("matplotlib")
    words = ("--dp", 1, 2, "--reduce-dtype", "bfloat16", "--bucket-size", "auto", "--backward-ms", 0)
    assert run(capsys, "--config", config, *words, "--plot", tmp_path / "x.svg")[0] == 0
    assert "</svg>" in (tmp_path / "x.svg").read_text(encoding="utf-8")


REFUSALS: list[tuple[tuple[object, ...], str]] = [
    (
        ("--layers", 4, "--vocab", 128),
        Said("Invalid model: no hidden", "Write --hidden N, or --config FILE with it."),
    ),
    (
        (*SIZES, "--pp", 3),
        Said("Invalid number of layers: 4", "Write a --pp that divides 4."),
    ),
    (
        (*SIZES, "--heads", 4, "--tp", 8),
        Said("Invalid number of heads: 4", "Write a --tp that divides 4."),
    ),
    (
        (*SIZES, "--heads", 3, "--kv-heads", 1),
        Said("Invalid hidden size: 64 over 3 heads", "Write --heads N, or give kv_channels in the config."),
    ),
    (
        (*SIZES, "--ep", 2, "--dp", 2),
        Said("Invalid --ep: 2", "Write --experts N, or leave --ep out."),
    ),
    (
        (*SIZES, "--ranks", 12, "--tp", 8),
        Said("Invalid --ranks: 12", "Write another number, or --dp N in its place."),
    ),
    (
        (*SIZES, "--dp", 64, "--bucket-size", 63),
        Said("Invalid bucket size: 63 elements", "Write --bucket-size 40000000."),
    ),
    (
        (*SIZES, "--dp", 4, "--rank", 4),
        Said("Invalid --rank: 4", "Write --rank 0 for the first one."),
    ),
    (
        (*SIZES, "--plot", "x.png"),
        Said("Invalid --plot: no time of backward", "Write --backward-ms MS or --tokens-per-second N as well."),
    ),
    (
        (*SIZES, "--backward-ms", 0, "--update-ms", 0, "--plot", "x.png"),
        Said("Invalid --plot: a step that takes no time", "Write a --backward-ms above 0."),
    ),
    (
        (*SIZES, "--grad-dtype", "fp32", "param", "--reduce-dtype", "bfloat16"),
        Said(
            "Invalid reduce_dtype: bfloat16 for grads kept in bfloat16",
            "Write --grad-dtype fp32, or --reduce-dtype none.",
        ),
    ),
    (
        ("--config", "/nowhere/config.json"),
        Said(
            "Invalid config: /nowhere/config.json ([Errno 2] No such file or directory: '/nowhere/config.json')",
            "Give a JSON file such as a HuggingFace config.json.",
        ),
    ),
]


@pytest.mark.parametrize(("words", "text"), REFUSALS)
def test_plan_when_something_does_not_fit_then_one_line_says_what_to_write(
    words: tuple[object, ...], text: Said, capsys: Output
) -> None:
    assert refused(capsys, *words) == text


def test_plot_when_matplotlib_is_missing_then_says_what_to_install(
    config: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr("megatron_distopt.cli.plan_plot.find_spec", lambda name: None)
    text = refused(capsys, "--config", config, "--backward-ms", 1, "--plot", tmp_path / "x.png")
    assert text == Said("Invalid --plot: matplotlib is not installed", "Run pip install matplotlib.")
    assert not (tmp_path / "x.png").exists()


def test_plot_when_the_format_is_unknown_then_refused(config: Path, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    text = refused(capsys, "--config", config, "--backward-ms", 1, "--plot", tmp_path / "x.nonsense")
    assert text.startswith(f"Invalid --plot: {tmp_path / 'x.nonsense'} (Format 'nonsense' is not supported")
    assert text.endswith("Must be a file that can be written, of a known format. Write --plot plan.png.")


@pytest.mark.parametrize(
    "words",
    [
        ("--bucket-size", "0"),
        ("--bucket-size", "-5"),
        ("--bucket-size", "some"),
        ("--bandwidth", "0"),
        ("--rank", "-1"),
        ("--latency-us", "nan"),
    ],
)
def test_plan_when_a_number_cannot_be_then_status_2(words: tuple[str, str], capsys: Output) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *map(str, SIZES), *words])
    assert stop.value.code == 2
    assert f"{words[0]}: Invalid " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (
            "[1]",
            "Invalid config: FILE with a list",
            "Give a JSON file such as a HuggingFace config.json.",
        ),
        (
            '{"num_layers": 2.5}',
            "Invalid key 'num_layers' of the config: 2.5",
            "Correct it, or give the flag in addition to --config.",
        ),
        (
            '{"num_layers": 2, "kv_lora_rank": 512}',
            "Invalid key 'kv_lora_rank' of the config: 512",
            "Take the key out to plan the rest of the model.",
        ),
    ],
)
def test_config_when_it_cannot_be_used_then_says_why(
    content: str, found: str, remedy: str, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content, encoding="utf-8")
    assert refused(capsys, "--config", file) == Said(found.replace("FILE", str(file)), remedy)
