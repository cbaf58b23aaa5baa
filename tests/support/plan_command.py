"""What tests of `plan` share: a model, and running the command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_distopt.cli import main as cli
from megatron_distopt.cli.plan_arguments import sizes_in_mapping
from megatron_distopt.cli.plan_model import GptSizes

__all__ = ["BUCKET", "CONFIG", "GPT", "SIZES", "Output", "document", "refused", "run"]

Output = pytest.CaptureFixture[str]
#: The model of the real runs, as a config of Megatron names it.
CONFIG = {
    "num_layers": 4,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "padded_vocab_size": 128,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 160,
}
GPT = GptSizes(**sizes_in_mapping(CONFIG))
BUCKET = 30_000
SIZES = ("--layers", 4, "--hidden", 64, "--vocab", 128)


def run(capsys: Output, *words: object) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    status = cli.main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def document(capsys: Output, *words: object) -> dict[str, Any]:
    status, lines, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads("\n".join(lines))
    return found


def refused(capsys: Output, *words: object) -> str:
    status, lines, err = run(capsys, *words)
    assert (status, lines) == (1, [])
    return err.removeprefix("megatron-distopt: ").rstrip("\n")
