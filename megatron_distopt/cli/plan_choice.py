"""One choice of sizes, dtypes and buckets: the params, layouts, bytes and collectives of every stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from megatron_distopt.cli.plan_model import GptSizes, ParallelSizes, check_cut
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import BufferLayout, ParamSpec, default_bucket_size, lay_out
from megatron_distopt.layout.estimate import (
    Collective,
    Footprint,
    Kind,
    Widths,
    collectives_of,
    estimate_footprint,
    stats_collective,
)

__all__ = [
    "AUTO",
    "DTYPES",
    "REDUCE_NBYTES",
    "Choice",
    "ChoicePlan",
    "PlannedBuffer",
    "StageParam",
    "StagePlan",
    "layout_of",
    "plan_choice",
    "plan_stage",
    "stage_params",
]

#: By name on the command line: torch's name, and bytes an element.
DTYPES = {"bf16": ("bfloat16", 2), "fp16": ("float16", 2), "fp32": ("float32", 4)}
#: Bytes an element of each `DistOptConfig.reduce_dtype`.
REDUCE_NBYTES = {"bfloat16": 2, "float16": 2}
#: The bucket size that runs with overlap choose by themselves.
AUTO: Final = "auto"


@dataclass(frozen=True)
class Choice:
    """One choice of sizes, dtypes and buckets.

    Args:
        cut: sizes of the parallel groups.
        dtype: of the params, a key of `DTYPES`.
        has_fp32_grads: whether the grad buffer is fp32, whatever the dtype of the params.
        bucket_size: elements of a bucket; None for one bucket a buffer, or `AUTO`.
        reduce_dtype: the dtype in which fp32 grads are communicated, a key of `REDUCE_NBYTES`; None for fp32.

    Raises:
        ConfigError: a `reduce_dtype` for grads that are kept in 16 bits, which training refuses as well.
    """

    cut: ParallelSizes
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
        width = DTYPES[self.dtype][1]
        reduce = 0 if self.reduce_dtype is None else REDUCE_NBYTES[self.reduce_dtype]
        grad, main = 4 if self.has_fp32_grads else width, 0 if self.dtype == "fp32" else 4
        return Widths(param=width, grad=grad, main=main, reduce=reduce)

    @property
    def grad_dtype(self) -> str:
        """The dtype of the grad buffer, a key of `DTYPES`."""
        return "fp32" if self.has_fp32_grads else self.dtype


@dataclass(frozen=True)
class PlannedBuffer:
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
    """The plan of a rank of one pipeline stage.

    Args:
        choice: the choice that it belongs to.
        stage: from 0.
        params: all of them, in the order of registration.
        parts: the same, by buffer: those of experts have one of their own where expert-parallel ranks differ in them.
    """

    choice: Choice
    stage: int
    params: tuple[StageParam, ...]
    parts: tuple[PlannedBuffer, ...]

    @property
    def numel(self) -> int:
        """Elements of all params."""
        return sum(param.spec.numel for param in self.params)

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes that the rank holds, by kind."""
        decays = {param.spec.name: param.decays for param in self.params}
        total = Footprint()
        for part in self.parts:
            total = total.plus(estimate_footprint(part.layout, part.rank, self.choice.widths, decays.__getitem__))
        return total

    @cached_property
    def collectives(self) -> tuple[tuple[PlannedBuffer | None, Collective], ...]:
        """The collectives of one step, each with the buffer whose bucket it moves."""
        return tuple(self._collectives())

    def _collectives(self) -> Iterator[tuple[PlannedBuffer | None, Collective]]:
        for part in self.parts:
            yield from ((part, each) for each in collectives_of(part.layout, self.choice.widths))
        yield from ((None, each) for each in stats_collective(self.choice.cut.num_ranks))

    @property
    def num_buckets(self) -> int:
        """Buckets of all buffers."""
        return sum(len(part.layout.buckets) for part in self.parts)

    def sent_by(self, kind: Kind) -> list[int]:
        """Returns the bytes that the rank sends in each collective of one kind."""
        return [each.sent_nbytes for _, each in self.collectives if each.kind is kind]

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the rank sends in one step."""
        return sum(each.sent_nbytes for _, each in self.collectives)


@dataclass(frozen=True)
class ChoicePlan:
    """The plan of all stages of one choice; the stages between the first and the last are alike and listed once.

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


def _part(params: tuple[StageParam, ...], choice: Choice, num_shards: int, rank: int) -> PlannedBuffer:
    numel = choice.bucket_size
    if isinstance(numel, int) and numel < num_shards:
        rule, remedy = f"be at least one element for each of {num_shards} ranks", "Write --bucket-size 40000000"
        raise ConfigError(refusal("bucket size", f"{numel} elements", rule, remedy))
    return PlannedBuffer(params, layout_of(params, choice, num_shards), rank)


def layout_of(params: Sequence[StageParam], choice: Choice, num_shards: int) -> BufferLayout:
    """Lays out a buffer in the reverse order of registration, as `distribute` does.

    Args:
        params: in the order of registration.
        choice: says the size of a bucket.
        num_shards: size of the data-parallel group.
    """
    specs, numel = [param.spec for param in reversed(params)], choice.bucket_size
    if isinstance(numel, str):
        numel = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
    return lay_out(specs, num_shards=num_shards, bucket_size=numel)


@dataclass(frozen=True)
class StageParam:
    """A param, with what decides when its gradient is there.

    Args:
        spec: name, shape and dtype.
        work: multiplications a token in forward, as a measure of the time that is spent on it.
        is_expert: it belongs to an expert that other ranks do not have.
        is_early: its work is at the end of forward, so at the beginning of backward, and its gradient is complete last
            all the same: a word embedding that is the output layer too. On one stage it was registered first; the copy
            on a last stage of its own waits for the sum with the first stage's, after backward.
    """

    spec: ParamSpec
    work: float = 0.0
    is_expert: bool = False
    is_early: bool = False

    @property
    def decays(self) -> bool:
        """Whether Megatron decays it, which it does with matrices only."""
        return len(self.spec.shape) > 1


def stage_params(gpt: GptSizes, cut: ParallelSizes, stage: int, dtype: str) -> tuple[StageParam, ...]:
    """Returns the params that a rank of one pipeline stage registers.

    Args:
        gpt, cut: agree with each other, see `check_cut`.
        stage: from 0.
        dtype: of all params, e.g. "bfloat16".
    """
    return tuple(_StageRank(gpt, cut, dtype).stage(stage))


@dataclass(frozen=True)
class _StageRank:
    gpt: GptSizes
    cut: ParallelSizes
    dtype: str

    def stage(self, stage: int) -> Iterator[StageParam]:
        is_first, is_last = stage == 0, stage == self.cut.pp - 1
        if is_first:
            yield from self._embedding(is_output=is_last and self.gpt.is_tied)
        for layer in range(self.gpt.layers // self.cut.pp):
            yield from self._layer(f"decoder.layers.{layer}")
        if is_last:
            yield from self._norm("decoder.final_layernorm")
            if not (is_first and self.gpt.is_tied):  # a last stage of its own has a copy of a tied embedding
                shape = self._vocab_shape()
                yield StageParam(self._spec("output_layer.weight", *shape), math.prod(shape), is_early=self.gpt.is_tied)

    def _embedding(self, *, is_output: bool) -> Iterator[StageParam]:
        shape = self._vocab_shape()
        spec = self._spec("embedding.word_embeddings.weight", *shape)
        yield StageParam(spec, math.prod(shape) if is_output else 0.0, is_early=is_output)
        if self.gpt.num_positions:  # a look-up is no work
            yield StageParam(
                self._spec("embedding.position_embeddings.weight", self.gpt.num_positions, self.gpt.hidden)
            )

    def _layer(self, name: str) -> Iterator[StageParam]:
        gpt, tp = self.gpt, self.cut.tp
        qkv_width = gpt.query_width + 2 * gpt.kv_width
        yield from self._norm(f"{name}.input_layernorm")
        yield from self._row_parallel(f"{name}.self_attention.linear_proj", gpt.query_width)
        yield self._param(f"{name}.self_attention.linear_qkv.weight", qkv_width // tp, gpt.hidden)
        if gpt.has_bias or gpt.has_qkv_bias:
            yield self._param(f"{name}.self_attention.linear_qkv.bias", qkv_width // tp)
        yield from self._norm(f"{name}.pre_mlp_layernorm")
        yield from self._experts(f"{name}.mlp") if gpt.experts else self._mlp(f"{name}.mlp", gpt.ffn_width)

    def _experts(self, name: str) -> Iterator[StageParam]:
        gpt, ep = self.gpt, self.cut.ep
        yield self._param(f"{name}.router.weight", gpt.experts, gpt.hidden)
        if gpt.has_bias:
            yield self._param(f"{name}.router.bias", gpt.experts)
        share = gpt.top_k * ep / gpt.experts  # of the tokens that the ranks of all experts send to one of them
        for expert in range(gpt.experts // ep):
            for param in self._mlp(f"{name}.experts.local_experts.{expert}", gpt.expert_ffn or gpt.ffn_width):
                yield StageParam(param.spec, param.work * share, is_expert=ep > 1)

    def _mlp(self, name: str, ffn: int) -> Iterator[StageParam]:
        width = ffn * (2 if self.gpt.is_gated else 1) // self.cut.tp
        yield self._param(f"{name}.linear_fc1.weight", width, self.gpt.hidden)
        if self.gpt.has_bias:
            yield self._param(f"{name}.linear_fc1.bias", width)
        yield from self._row_parallel(f"{name}.linear_fc2", ffn)

    def _row_parallel(self, name: str, width: int) -> Iterator[StageParam]:
        """Yields a layer whose input is cut; its bias, which is added to the sum, is whole on every rank."""
        yield self._param(f"{name}.weight", self.gpt.hidden, width // self.cut.tp)
        if self.gpt.has_bias:
            yield self._param(f"{name}.bias", self.gpt.hidden)

    def _norm(self, name: str) -> Iterator[StageParam]:
        for kind in ("weight",) if self.gpt.is_rms else ("weight", "bias"):
            yield self._param(f"{name}.{kind}", self.gpt.hidden)

    def _param(self, name: str, *shape: int) -> StageParam:
        return StageParam(self._spec(name, *shape), math.prod(shape) if len(shape) > 1 else 0.0)

    def _spec(self, name: str, *shape: int) -> ParamSpec:
        return ParamSpec(name, math.prod(shape), shape, self.dtype)

    def _vocab_shape(self) -> tuple[int, int]:
        return self.gpt.padded_vocab(self.cut.tp) // self.cut.tp, self.gpt.hidden
