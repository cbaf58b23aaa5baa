"""What tests of `plan` share: a model, and running the command."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.nn import Module, Parameter

from megatron_distopt.cli.plan_command import StagePlan
from megatron_distopt.cli.plan_model import GptSizes
from tests.support import checkpoint_commands
from tests.support.checkpoint_commands import Output

__all__ = ["BUCKET", "GPT", "SIZES", "Output", "document", "module_of", "refused", "run"]

#: The model of the real runs.
GPT = GptSizes(layers=4, hidden=40, heads=4, vocab=128, seq=16)
SIZES = ("--layers", 4, "--hidden", 40, "--heads", 4, "--vocab", 128, "--seq", 16)
BUCKET = 30_000


def module_of(plan: StagePlan) -> Module:
    """The params of a rank, on the CPU."""
    model = Module()
    for number, param in enumerate(plan.params):
        dtype: torch.dtype = getattr(torch, param.spec.dtype)
        model.register_parameter(
            f"param{number}", Parameter(torch.zeros(param.spec.shape, dtype=dtype))
        )
    return model


def run(capsys: Output, *words: object) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    return checkpoint_commands.run(capsys, "plan", *words)


def document(capsys: Output, *words: object) -> dict[str, Any]:
    status, lines, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads("\n".join(lines))
    return found


def refused(capsys: Output, *words: object) -> str:
    status, lines, err = run(capsys, *words)
    assert (status, lines) == (1, [])
    return err.removeprefix("megatron-distopt: ").rstrip("\n")
