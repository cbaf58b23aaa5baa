"""What tests of `plan` share: a model, and running the command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_distopt.cli import main as cli
from megatron_distopt.cli.plan_model import GptSizes

__all__ = ["BUCKET", "GPT", "SIZES", "Output", "document", "refused", "run"]

Output = pytest.CaptureFixture[str]
#: The model of the real runs.
GPT = GptSizes(layers=4, hidden=40, heads=4, vocab=128, seq=16)
SIZES = ("--layers", 4, "--hidden", 40, "--heads", 4, "--vocab", 128, "--seq", 16)
BUCKET = 30_000


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
