"""One choice of sizes, dtypes and buckets, worked out: the layouts of every stage, their bytes, their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import BufferLayout, default_bucket_size, lay_out
from megatron_distopt.layout.estimate import (
    Collective,
    Footprint,
    Widths,
    collectives_of,
    estimate_footprint,
    stats_collective,
)
from megatron_distopt.plugin.commands.plan_model import Cut, GptSizes, check_cut
from megatron_distopt.plugin.commands.plan_stage import StageParam, stage_params

__all__ = [
    "AUTO",
    "DTYPES",
    "WIRE_NBYTES",
    "Choice",
    "ChoicePlan",
    "Part",
    "StagePlan",
    "layout_of",
    "plan_choice",
    "plan_stage",
]

#: What torch calls them, and bytes an element.
DTYPES = {"bf16": ("bfloat16", 2), "fp16": ("float16", 2), "fp32": ("float32", 4)}
#: By what `DistOptConfig.reduce_dtype` can be: bytes an element.
WIRE_NBYTES = {"bfloat16": 2, "float16": 2}
#: Buckets as large as runs have them that communicate beside computation and are told no size.
AUTO: Final = "auto"


@dataclass(frozen=True)
class Choice:
    """What is compared.

    Args:
        cut: sizes of the groups.
        dtype: of the params, a key of `DTYPES`.
        has_fp32_grads: the grad buffer is fp32 whatever the params are.
        bucket_size: elements of a bucket; None for one bucket a buffer, or `AUTO`.
        reduce_dtype: what fp32 grads are rounded to on their way, a key of `WIRE_NBYTES`; None for as they are.

    Raises:
        ConfigError: grads that are kept in 16 bits are to be rounded, which training refuses, too.
    """

    cut: Cut
    dtype: str = "bf16"
    has_fp32_grads: bool = True
    bucket_size: int | Literal["auto"] | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.reduce_dtype is not None and self.grad_dtype != "fp32":
            got = f"{self.reduce_dtype} for grads kept in {DTYPES[self.grad_dtype][0]}"
            remedy = "Write --grad-dtype fp32, or --reduce-dtype none"
            raise ConfigError(refusal("reduce_dtype", got, "have fp32 grads to round", remedy))

    @property
    def widths(self) -> Widths:
        """Bytes an element."""
        width, wire = DTYPES[self.dtype][1], 0 if self.reduce_dtype is None else WIRE_NBYTES[self.reduce_dtype]
        grad, main = 4 if self.has_fp32_grads else width, 0 if self.dtype == "fp32" else 4
        return Widths(param=width, grad=grad, main=main, wire=wire)

    @property
    def grad_dtype(self) -> str:
        """Of the grad buffer, a key of `DTYPES`."""
        return "fp32" if self.has_fp32_grads else self.dtype


@dataclass(frozen=True)
class Part:
    """Params that share a buffer, and the group that shards it.

    Args:
        params: in the order of registration.
        layout: of the buffer, in the order of backward.
        rank: in the group.
    """

    params: tuple[StageParam, ...]
    layout: BufferLayout
    rank: int


@dataclass(frozen=True)
class StagePlan:
    """A rank of one pipeline stage.

    Args:
        choice: that it is of.
        stage: from 0.
        params: all of them, in the order of registration.
        parts: the same, by buffer: those of experts have one of their own where expert-parallel ranks differ in them.
    """

    choice: Choice
    stage: int
    params: tuple[StageParam, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements of the params."""
        return sum(param.spec.numel for param in self.params)

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes that the rank holds."""
        decays = {param.spec.name: param.decays for param in self.params}
        total = Footprint()
        for part in self.parts:
            total = total.beside(estimate_footprint(part.layout, part.rank, self.choice.widths, decays.__getitem__))
        return total

    @cached_property
    def collectives(self) -> tuple[tuple[Part | None, Collective], ...]:
        """Of one step, each with the part whose bucket it is of."""
        return tuple(self._collectives())

    def _collectives(self) -> Iterator[tuple[Part | None, Collective]]:
        for part in self.parts:
            yield from ((part, each) for each in collectives_of(part.layout, self.choice.widths))
        yield from ((None, each) for each in stats_collective(self.choice.cut.num_ranks))

    @property
    def num_buckets(self) -> int:
        """Of all buffers."""
        return sum(len(part.layout.buckets) for part in self.parts)

    @property
    def sent_nbytes(self) -> int:
        """By the rank, in one step."""
        return sum(each.sent_nbytes for _, each in self.collectives)


@dataclass(frozen=True)
class ChoicePlan:
    """All stages of one choice; those between the first and the last are alike and stand here once.

    Args:
        choice: the choice.
        stages: the different ones, in order.
    """

    choice: Choice
    stages: tuple[StagePlan, ...]

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.footprint.lasting_nbytes)

    def stage_numbers(self, plan: StagePlan) -> range:
        """The stages that one of `stages` stands for."""
        last = self.choice.cut.pp - 1
        return range(1, last) if 0 < plan.stage < last else range(plan.stage, plan.stage + 1)


def plan_choice(gpt: GptSizes, choice: Choice) -> ChoicePlan:
    """Works out every stage for the first data-parallel rank, on which no padding of a bucket's end lies.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    numbers = sorted({0, min(1, choice.cut.pp - 1), choice.cut.pp - 1})
    return ChoicePlan(choice, tuple(plan_stage(gpt, choice, stage) for stage in numbers))


def plan_stage(gpt: GptSizes, choice: Choice, stage: int, rank: int = 0) -> StagePlan:
    """Works out one rank.

    Args:
        gpt: the model.
        choice: how it is trained.
        stage: of the pipeline.
        rank: in the data-parallel group; its experts' group has every `ep`-th of its ranks.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    cut = choice.cut
    check_cut(gpt, cut)
    params = stage_params(gpt, cut, stage, DTYPES[choice.dtype][0])
    dense = tuple(param for param in params if not param.is_expert)
    experts = tuple(param for param in params if param.is_expert)
    parts = [_part(dense, choice, cut.dp, rank)]
    parts += [_part(experts, choice, cut.dp // cut.ep, rank // cut.ep)] if experts else []
    return StagePlan(choice, stage, params, tuple(parts))


def _part(params: tuple[StageParam, ...], choice: Choice, num_shards: int, rank: int) -> Part:
    numel = choice.bucket_size
    if isinstance(numel, int) and numel < num_shards:
        rule, remedy = f"be at least one element for each of {num_shards} ranks", "Write --bucket-size 40000000"
        raise ConfigError(refusal("bucket size", f"{numel} elements", rule, remedy))
    return Part(params, layout_of(params, choice, num_shards), rank)


def layout_of(params: Sequence[StageParam], choice: Choice, num_shards: int) -> BufferLayout:
    """Of a buffer: the reverse of registration, as `distribute` has it.

    Args:
        params: in the order of registration.
        choice: says the size of a bucket.
        num_shards: size of the data-parallel group.
    """
    specs, numel = [param.spec for param in reversed(params)], choice.bucket_size
    if isinstance(numel, str):
        numel = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
    return lay_out(specs, num_shards=num_shards, bucket_size=numel)
