"""What is planned: a GPT, a choice of parallel sizes, dtypes and buckets, and the params of a rank
of each stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import ParamSpec
from megatron_distopt.layout.estimate import MAIN_NBYTES, MOMENT_NBYTES, WITH_SCALES, Widths

#: By name on the command line: torch's name, and bytes an element.
DTYPES = {"bf16": ("bfloat16", 2), "fp16": ("float16", 2), "fp32": ("float32", 4)}
#: Bytes an element of each `DistOptConfig.reduce_dtype`.
REDUCE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: The bucket size that runs with overlap choose by themselves.
AUTO: Final = "auto"
#: Options of a run that are chosen here under the same names.
_STATE_OPTIONS = (
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "offload_fraction",
    "ema_decay",
)
#: Megatron makes the width of a gated MLP a multiple of this, and the vocabulary of a rank one of
#: the other.
_GATED_MULTIPLE, _VOCAB_MULTIPLE = 64, 128


@dataclass(frozen=True, kw_only=True)
class GptSizes:
    """The sizes that decide the shapes of the params."""

    layers: int
    hidden: int
    vocab: int  # tokens
    seq: int = 2048  # tokens of a sequence, and rows of a learned position embedding
    heads: int | None = None  # of attention; None where their number does not matter
    kv_heads: int | None = None  # heads that keys and values have; `heads` where None
    head_dim: int | None = None  # `hidden / heads` where None
    # width of the MLP; 4 times `hidden` where None, 8/3 times of a gated one
    ffn: int | None = None
    experts: int = 0  # in the MLP of each layer; 0 for an MLP without
    expert_ffn: int | None = None  # width of an expert; `ffn` where None
    is_gated: bool = False  # the MLP has a gate in addition to its up projection
    is_tied: bool = True  # the output layer is the word embedding
    has_bias: bool = True  # linear layers have one
    # the projection to queries, keys and values has one, whatever `has_bias` says
    has_qkv_bias: bool = False
    is_rms: bool = False  # norms have a weight and no bias
    is_rotary: bool = False  # positions have no params

    @property
    def ffn_width(self) -> int:
        if self.ffn is not None:
            return self.ffn
        return (
            self.hidden * 8 // 3 // _GATED_MULTIPLE * _GATED_MULTIPLE
            if self.is_gated
            else 4 * self.hidden
        )

    @property
    def query_width(self) -> int:
        return self.hidden if self.heads is None else self.heads * self._head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.query_width if self.kv_heads is None else self.kv_heads * self._head_width

    def padded_vocab(self, tp: int) -> int:
        """Rows of the word embedding of all tensor-parallel ranks."""
        multiple = _VOCAB_MULTIPLE * tp
        return -(-self.vocab // multiple) * multiple

    @property
    def _head_width(self) -> int:
        if self.head_dim is not None:
            return self.head_dim
        if self.heads is None or self.hidden % self.heads:
            raise ConfigError(
                f"The hidden size {self.hidden} is not divisible by {self.heads} heads. Write "
                "other --heads, or --head-dim."
            )
        return self.hidden // self.heads


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the groups that a model is cut over."""

    dp: int  # data-parallel ranks, which hold the same params
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline stages
    ep: int = 1  # expert-parallel ranks, which are data-parallel ranks of all other params

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Choice:
    """One choice of sizes, dtypes, buckets and of the form, place and kind of the optimizer state.

    What training would refuse is refused here as well.
    """

    cut: ParallelSizes
    dtype: str = "bf16"  # of the params, a key of `DTYPES`
    grad_dtype: str = "fp32"  # of the grad buffer, a key of `DTYPES`
    # in which fp32 grads are communicated, a key of `REDUCE_NBYTES`; None for fp32
    reduce_dtype: str | None = None
    bucket_size: int | Literal["auto"] | None = None  # elements; None for one bucket a buffer
    main_params_dtype: str = "float32"  # a key of `MAIN_NBYTES`
    exp_avg_dtype: str = "float32"  # form of the first moment, a key of `MOMENT_NBYTES`
    exp_avg_sq_dtype: str = "float32"  # form of the second moment
    offload_fraction: float = 0.0  # the part of the state that is on the host, by buckets
    ema_decay: float | None = None  # of averages of the main params

    def __post_init__(self) -> None:
        state = {name: getattr(self, name) for name in _STATE_OPTIONS}
        config = DistOptConfig(loss_scale="dynamic", reduce_dtype=self.reduce_dtype, **state)
        others = {
            Feature.FP16_PARAMS: self.dtype == "fp16" and "--dtype fp16",
            Feature.ONLY_FP32_PARAMS: self.dtype == "fp32" and "--dtype fp32",
            Feature.SHORT_GRADS: self.grad_dtype != "fp32"
            and f"gradients that are kept in {self.grad_dtype}",
        }
        check_compatible(config, {feature: words for feature, words in others.items() if words})

    @property
    def widths(self) -> Widths:
        moments = (self.exp_avg_dtype, self.exp_avg_sq_dtype)
        is_own_main = self.dtype == "fp32"
        return Widths(
            param=DTYPES[self.dtype][1],
            grad=DTYPES[self.grad_dtype][1],
            main=0 if is_own_main else MAIN_NBYTES[self.main_params_dtype],
            moments=sum(MOMENT_NBYTES[form] for form in moments),
            reduce=0 if self.reduce_dtype is None else REDUCE_NBYTES[self.reduce_dtype],
            moment_scales=moments.count(WITH_SCALES),
            average=0 if self.ema_decay is None else 4,
        )


def check_cut(gpt: GptSizes, cut: ParallelSizes) -> None:
    """Refuses sizes that Megatron would refuse: something does not divide evenly, or there are no
    experts to spread."""
    if cut.ep > 1 and not gpt.experts:
        raise ConfigError(
            f"--ep is {cut.ep}, but the model has no experts. Write --experts N, or leave --ep out."
        )
    for what, number, flag, size in (
        ("layers", gpt.layers, "--pp", cut.pp),
        ("hidden elements", gpt.hidden, "--tp", cut.tp if gpt.heads is None else 1),
        ("heads", gpt.heads or 0, "--tp", cut.tp),
        ("key and value heads", gpt.kv_heads or 0, "--tp", cut.tp),
        ("MLP width", gpt.ffn_width, "--tp", cut.tp),
        ("expert width", gpt.expert_ffn or gpt.ffn_width, "--tp", cut.tp),
        ("vocabulary", gpt.padded_vocab(cut.tp), "--tp", cut.tp),
        ("experts", gpt.experts, "--ep", cut.ep),
        ("data-parallel ranks", cut.dp, "--ep", cut.ep),
    ):
        if number % size:
            raise ConfigError(
                f"{number} ({what}) is not divisible by {flag} {size}. Write a {flag} that divides "
                "it."
            )


@dataclass(frozen=True)
class StageParam:
    """A param of one rank."""

    spec: ParamSpec
    is_expert: bool = False  # it belongs to an expert that other ranks do not have

    @property
    def decays(self) -> bool:
        """Whether Megatron decays it, which it does with matrices only."""
        return len(self.spec.shape) > 1


def stage_params(
    gpt: GptSizes, cut: ParallelSizes, stage: int, dtype: str
) -> tuple[StageParam, ...]:
    """Returns the params that a rank of one pipeline stage, counted from 0, registers, in that
    order.

    The sizes agree with each other, which `check_cut` checks; `dtype` is that of all params, such
    as "bfloat16".
    """
    return tuple(_ParamsOfStage(gpt, cut, dtype).of(stage))


@dataclass(frozen=True)
class _ParamsOfStage:
    gpt: GptSizes
    cut: ParallelSizes
    dtype: str

    def of(self, stage: int) -> Iterator[StageParam]:
        is_first, is_last = stage == 0, stage == self.cut.pp - 1
        vocab_shape = (self.gpt.padded_vocab(self.cut.tp) // self.cut.tp, self.gpt.hidden)
        if is_first:
            yield self._param("embedding.word_embeddings.weight", *vocab_shape)
            if not self.gpt.is_rotary:
                yield self._param(
                    "embedding.position_embeddings.weight", self.gpt.seq, self.gpt.hidden
                )
        for layer in range(self.gpt.layers // self.cut.pp):
            yield from self._layer(f"decoder.layers.{layer}")
        if is_last:
            yield from self._norm("decoder.final_layernorm")
            # a last stage of its own has a copy of a tied embedding
            if not (is_first and self.gpt.is_tied):
                yield self._param("output_layer.weight", *vocab_shape)

    def _layer(self, name: str) -> Iterator[StageParam]:
        gpt, tp = self.gpt, self.cut.tp
        yield from self._norm(f"{name}.input_layernorm")
        yield from self._row_parallel(f"{name}.self_attention.linear_proj", gpt.query_width)
        rows = (gpt.query_width + 2 * gpt.kv_width) // tp
        yield self._param(f"{name}.self_attention.linear_qkv.weight", rows, gpt.hidden)
        if gpt.has_bias or gpt.has_qkv_bias:
            yield self._param(f"{name}.self_attention.linear_qkv.bias", rows)
        yield from self._norm(f"{name}.pre_mlp_layernorm")
        yield from (
            self._experts(f"{name}.mlp") if gpt.experts else self._mlp(f"{name}.mlp", gpt.ffn_width)
        )

    def _experts(self, name: str) -> Iterator[StageParam]:
        gpt, ep = self.gpt, self.cut.ep
        yield self._param(f"{name}.router.weight", gpt.experts, gpt.hidden)
        if gpt.has_bias:
            yield self._param(f"{name}.router.bias", gpt.experts)
        for expert in range(gpt.experts // ep):
            for param in self._mlp(
                f"{name}.experts.local_experts.{expert}", gpt.expert_ffn or gpt.ffn_width
            ):
                yield replace(param, is_expert=ep > 1)

    def _mlp(self, name: str, ffn: int) -> Iterator[StageParam]:
        width = ffn * (2 if self.gpt.is_gated else 1) // self.cut.tp
        yield self._param(f"{name}.linear_fc1.weight", width, self.gpt.hidden)
        if self.gpt.has_bias:
            yield self._param(f"{name}.linear_fc1.bias", width)
        yield from self._row_parallel(f"{name}.linear_fc2", ffn)

    def _row_parallel(self, name: str, width: int) -> Iterator[StageParam]:
        """A layer whose input is cut; its bias, which is added to the sum, is whole on every
        rank."""
        yield self._param(f"{name}.weight", self.gpt.hidden, width // self.cut.tp)
        if self.gpt.has_bias:
            yield self._param(f"{name}.bias", self.gpt.hidden)

    def _norm(self, name: str) -> Iterator[StageParam]:
        for kind in ("weight",) if self.gpt.is_rms else ("weight", "bias"):
            yield self._param(f"{name}.{kind}", self.gpt.hidden)

    def _param(self, name: str, *shape: int) -> StageParam:
        return StageParam(ParamSpec(name, math.prod(shape), shape, self.dtype))
