"""What the layout knows of a parameter, and where it put it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout.span import Span

__all__ = ["ParamSlot", "ParamSpec"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter, without its tensor.

    Args:
        name: unique among the params of one optimizer.
        numel: elements.
        shape: as the module sees it; `()` where it does not matter.
        dtype: of the model param, e.g. "bfloat16".
    """

    name: str
    numel: int
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.numel < 1:
            rule = "have at least 1 element"
            raise LayoutError(refusal(f"param {self.name!r}", f"{self.numel} elements", rule, "Freeze or drop it"))
        if self.shape and math.prod(self.shape) != self.numel:
            rule = f"have a shape of {self.numel} elements"
            raise LayoutError(refusal(f"param {self.name!r}", f"shape {self.shape}", rule, "Give its own shape"))


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """The place of one parameter in a buffer; a parameter never crosses a bucket."""

    name: str
    bucket: int
    in_buffer: Span
