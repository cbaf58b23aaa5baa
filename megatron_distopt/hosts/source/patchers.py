"""Packages that replace functions of a Megatron as we do, by the name that they are imported under. Data only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PATCHERS", "Patcher"]


@dataclass(frozen=True)
class Patcher:
    """Somebody else who replaces functions of a Megatron.

    Args:
        module: importable name.
        owner: who makes it.
    """

    module: str
    owner: str


PATCHERS = (
    Patcher("mindspeed", "MindSpeed"),
    Patcher("mindspeed_llm", "MindSpeed-LLM"),
    Patcher("megatron_adaptor", "MindSpeed"),
    Patcher("primus", "Primus"),
    Patcher("megatron_patch", "Pai-Megatron-Patch"),
    Patcher("musa_patch", "Moore Threads"),
)
