"""What tests of the commands on checkpoints share: running them, reading what they print, and
damaging checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from megatron_distopt.checkpoint import MANIFEST, read_manifest
from megatron_distopt.checkpoint.manifest_text import to_text
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.cli import main as cli

__all__ = [
    "EMBEDDING",
    "ITERATION",
    "QKV",
    "Output",
    "cells",
    "changed",
    "document",
    "rewritten",
    "run",
]

Output = pytest.CaptureFixture[str]
ITERATION = "iter_0000100"
EMBEDDING = "embedding.word_embeddings.weight"
QKV = "decoder.layers.2.self_attention.linear_qkv.weight"


def run(capsys: Output, *words: object) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of every line that is not empty."""
    return [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()]


def document(capsys: Output, *words: str | Path) -> tuple[int, dict[str, object]]:
    status, lines, _ = run(capsys, *words, "--json")
    return status, json.loads("\n".join(lines))


def rewritten(folder: Path, **changes: object) -> None:
    """With another manifest of the same files."""
    manifest = replace(read_manifest(folder), **changes)  # type: ignore[arg-type]
    (folder / MANIFEST).write_text(to_text(manifest), encoding="utf-8")


def changed(source: Source, change: Callable[[str, Tensor], Tensor]) -> Source:
    """With other values."""
    return replace(source, read_box=lambda key, box: change(key, source.read_box(key, box)))
