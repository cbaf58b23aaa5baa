"""What is planned: a GPT, a choice of parallel sizes, dtypes and buckets, and the params of a rank of each stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import MatrixCut, MatrixSpec, ParamSpec
from megatron_distopt.layout.estimate import MAIN_NBYTES, MOMENT_NBYTES, PART_OF_MODEL, WITH_SCALES, Widths
from megatron_distopt.options import FRACTION

#: By name on the command line: torch's name, and bytes an element.
DTYPES = {"bf16": ("bfloat16", 2), "fp16": ("float16", 2), "fp32": ("float32", 4)}
#: Bytes an element of each `DistOptConfig.reduce_dtype`.
REDUCE_NBYTES = {"bfloat16": 2, "float16": 2}
#: The bucket size that runs with overlap choose by themselves.
AUTO: Final = "auto"
#: What updates the params: Adam, or Muon the matrices of layers and Adam all else.
OPTIMIZERS = ("adam", "muon")
#: How tensor-parallel ranks share a matrix of Muon's; the default of a run is first.
TP_MODES = ("duplicated", "blockwise")
#: Megatron makes the width of a gated MLP a multiple of this.
_GATED_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class GptSizes:
    """The sizes that decide the shapes of the params.

    Args:
        layers, hidden: number and width.
        vocab: tokens.
        vocab_multiple: `vocab` is padded to a multiple of this times the tensor-parallel size; 0 for one that is
            padded already.
        seq: tokens of a sequence.
        positions: rows of the learned position embedding, `seq` where None, 0 for rotary or no positions.
        heads: of attention; None where it does not matter.
        kv_heads: heads that keys and values have; `heads` where None.
        head_dim: `hidden / heads` where None.
        ffn: width of the MLP; 4 times `hidden` where None, 8/3 times of a gated one.
        experts: in the MLP of each layer; 0 for an MLP without.
        expert_ffn: width of an expert; `ffn` where None.
        top_k: experts that a token goes to.
        is_gated: the MLP has a gate in addition to its up projection.
        is_tied: the output layer is the word embedding.
        has_bias: linear layers have one.
        has_qkv_bias: the projection to queries, keys and values has one, whatever `has_bias` says.
        is_rms: norms have a weight and no bias.
    """

    layers: int
    hidden: int
    vocab: int
    vocab_multiple: int = 128
    seq: int = 2048
    positions: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    experts: int = 0
    expert_ffn: int | None = None
    top_k: int = 2
    is_gated: bool = False
    is_tied: bool = True
    has_bias: bool = True
    has_qkv_bias: bool = False
    is_rms: bool = False

    @property
    def ffn_width(self) -> int:
        """Width of the MLP, without the gate."""
        if self.ffn is not None:
            return self.ffn
        return self.hidden * 8 // 3 // _GATED_MULTIPLE * _GATED_MULTIPLE if self.is_gated else 4 * self.hidden

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.hidden if self.heads is None else self.heads * self._head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.query_width if self.kv_heads is None else self.kv_heads * self._head_dim

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding."""
        return self.seq if self.positions is None else self.positions

    def padded_vocab(self, tp: int) -> int:
        """Rows of the word embedding of all tensor-parallel ranks.

        >>> GptSizes(layers=1, hidden=8, vocab=50257).padded_vocab(2)
        50432
        """
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple if multiple else self.vocab

    @property
    def _head_dim(self) -> int:
        if self.head_dim is not None:
            return self.head_dim
        if self.heads is None or self.hidden % self.heads:
            got, rule = f"{self.hidden} over {self.heads} heads", "divide evenly"
            raise ConfigError(refusal("hidden size", got, rule, "Write --heads N, or give kv_channels in the config"))
        return self.hidden // self.heads


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the groups that a model is cut over.

    Args:
        dp: data-parallel ranks, which hold the same params.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, which are data-parallel ranks of all other params.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups together."""
        return self.dp * self.tp * self.pp

    def place_of(self, rank: int) -> tuple[int, int]:
        """Stage and data-parallel rank, in Megatron's order: tensor-parallel ranks are neighbours, stages far apart.

        >>> ParallelSizes(dp=4, tp=2, pp=3).place_of(13)
        (1, 2)
        """
        return rank // (self.tp * self.dp), rank // self.tp % self.dp

    def data_ranks(self, rank: int) -> range:
        """The data-parallel group of a rank.

        >>> list(ParallelSizes(dp=4, tp=2, pp=3).data_ranks(13))
        [9, 11, 13, 15]
        """
        first = rank - self.place_of(rank)[1] * self.tp
        return range(first, first + self.dp * self.tp, self.tp)

    def expert_ranks(self, rank: int) -> range:
        """The ranks of its data-parallel group that hold the same experts.

        >>> list(ParallelSizes(dp=4, tp=2, pp=3, ep=2).expert_ranks(13))
        [9, 13]
        """
        return self.data_ranks(rank)[self.place_of(rank)[1] % self.ep :: self.ep]


@dataclass(frozen=True)
class Choice:
    """One choice of sizes, dtypes and buckets.

    Args:
        cut: sizes of the parallel groups.
        dtype: of the params, a key of `DTYPES`.
        has_fp32_grads: whether the grad buffer is fp32, whatever the dtype of the params.
        bucket_size: elements of a bucket; None for one bucket a buffer, or `AUTO`.
        reduce_dtype: the dtype in which fp32 grads are communicated, a key of `REDUCE_NBYTES`; None for fp32.
        main_params_dtype: the form of main params, a key of `MAIN_NBYTES`.
        exp_avg_dtype, exp_avg_sq_dtype: the forms of the moments, keys of `MOMENT_NBYTES`.
        offload_fraction: the part of the state that is on the host, by buckets.
        optimizer: one of `OPTIMIZERS`.
        muon_tp_mode: one of `TP_MODES`.

    Raises:
        ConfigError: a `reduce_dtype` for grads that are kept in 16 bits, main params that belong to other params, a
            fraction on the host that is none or of fp32 params, or state of Muon that is not fp32 on the device;
            training refuses these as well.
    """

    cut: ParallelSizes
    dtype: str = "bf16"
    has_fp32_grads: bool = True
    bucket_size: int | Literal["auto"] | None = None
    reduce_dtype: str | None = None
    main_params_dtype: str = "float32"
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"
    offload_fraction: float = 0.0
    optimizer: str = "adam"
    muon_tp_mode: str = TP_MODES[0]

    def __post_init__(self) -> None:
        if self.has_muon and (self.state or self.offload_fraction):
            got, rule = self.state or f"{self.offload_fraction:g} on the host", "be fp32 on the device with Muon"
            raise ConfigError(refusal("optimizer state", got, rule, "Write --optimizer adam, or leave it fp32"))
        FRACTION.check("--offload-fraction", self.offload_fraction, lambda flag, meant: f"Write {flag} {meant}")
        if self.offload_fraction and self.dtype == "fp32":
            got, rule = f"{self.offload_fraction} for fp32 params", "be 0 for them: they are their own main params"
            raise ConfigError(refusal("--offload-fraction", got, rule, "Write --offload-fraction 0, or --dtype bf16"))
        if self.main_params_dtype in PART_OF_MODEL and self.dtype == "fp16":
            got, remedy = f"{self.main_params_dtype} for params of float16", "Write --main-params-dtype float32"
            raise ConfigError(refusal("main_params_dtype", got, "belong to params of bfloat16", remedy))
        if self.reduce_dtype is not None and self.grad_dtype != "fp32":
            got = f"{self.reduce_dtype} for grads kept in {DTYPES[self.grad_dtype][0]}"
            remedy = "Write --grad-dtype fp32, or --reduce-dtype none"
            raise ConfigError(refusal("reduce_dtype", got, "have fp32 grads to round", remedy))

    @property
    def has_muon(self) -> bool:
        """Whether Muon updates the matrices of layers."""
        return self.optimizer != "adam"

    @property
    def widths(self) -> Widths:
        """Bytes an element."""
        width = DTYPES[self.dtype][1]
        reduce = 0 if self.reduce_dtype is None else REDUCE_NBYTES[self.reduce_dtype]
        grad, main = 4 if self.has_fp32_grads else width, MAIN_NBYTES[self.main_params_dtype]
        moments = (self.exp_avg_dtype, self.exp_avg_sq_dtype)
        is_own = self.dtype == "fp32"
        return Widths(
            param=width,
            grad=grad,
            main=0 if is_own else main,
            moments=sum(MOMENT_NBYTES[each] for each in moments),
            reduce=reduce,
            main_scales=int(self.main_params_dtype in WITH_SCALES and not is_own),
            moment_scales=sum(each in WITH_SCALES for each in moments),
            reads_param=is_own or self.main_params_dtype in PART_OF_MODEL,
        )

    @property
    def state(self) -> str:
        """The forms of the state in a few words; empty where all of it is fp32."""
        named = {"main": self.main_params_dtype, "exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return ", ".join(f"{name} {form}" for name, form in named.items() if form != "float32")

    @property
    def grad_dtype(self) -> str:
        """The dtype of the grad buffer, a key of `DTYPES`."""
        return "fp32" if self.has_fp32_grads else self.dtype


def check_cut(gpt: GptSizes, cut: ParallelSizes) -> None:
    """Refuses sizes that Megatron would refuse.

    Raises:
        ConfigError: something does not divide evenly, or experts are asked for that are not there.
    """
    if cut.ep > 1 and not gpt.experts:
        rule, remedy = "be 1 for a model without experts", "Write --experts N, or leave --ep out"
        raise ConfigError(refusal("--ep", cut.ep, rule, remedy))
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
            rule, remedy = f"be divisible by {flag} {size}", f"Write a {flag} that divides {number}"
            raise ConfigError(refusal(f"number of {what}", number, rule, remedy))


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
        matrices: that Muon takes it for; None where it leaves it to Adam.
        tp_dim: along which tensor-parallel ranks share it: 0 or 1; None where each has all of it.
    """

    spec: ParamSpec
    work: float = 0.0
    is_expert: bool = False
    is_early: bool = False
    matrices: MatrixSpec | None = None
    tp_dim: int | None = None

    def matrices_over(self, tp: int, mode: str) -> MatrixSpec | None:
        """Its matrices where so many tensor-parallel ranks share them in one of `TP_MODES`."""
        if self.matrices is None or self.tp_dim is None or tp == 1 or mode == "blockwise":
            return self.matrices
        return replace(self.matrices, cut=MatrixCut(self.tp_dim, tp))

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
        yield self._qkv(f"{name}.self_attention.linear_qkv.weight", qkv_width // tp)
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
                yield replace(param, work=param.work * share, is_expert=ep > 1)

    def _mlp(self, name: str, ffn: int) -> Iterator[StageParam]:
        width = ffn * (2 if self.gpt.is_gated else 1) // self.cut.tp
        yield self._param(f"{name}.linear_fc1.weight", width, self.gpt.hidden, tp_dim=0)
        if self.gpt.has_bias:
            yield self._param(f"{name}.linear_fc1.bias", width)
        yield from self._row_parallel(f"{name}.linear_fc2", ffn)

    def _row_parallel(self, name: str, width: int) -> Iterator[StageParam]:
        """Yields a layer whose input is cut; its bias, which is added to the sum, is whole on every rank."""
        yield self._param(f"{name}.weight", self.gpt.hidden, width // self.cut.tp, tp_dim=1)
        if self.gpt.has_bias:
            yield self._param(f"{name}.bias", self.gpt.hidden)

    def _norm(self, name: str) -> Iterator[StageParam]:
        for kind in ("weight",) if self.gpt.is_rms else ("weight", "bias"):
            yield self._param(f"{name}.{kind}", self.gpt.hidden)

    def _qkv(self, name: str, rows: int) -> StageParam:
        """Queries, keys and values of one group of heads after another, each kind a matrix."""
        gpt, whole = self.gpt, self._param(name, rows, self.gpt.hidden, tp_dim=0)
        groups = (gpt.kv_heads or gpt.heads or self.cut.tp) // self.cut.tp
        sizes = tuple(width // self.cut.tp // groups for width in (gpt.query_width, gpt.kv_width, gpt.kv_width))
        return replace(whole, matrices=MatrixSpec(rows, gpt.hidden, sizes=sizes, repeats=groups))

    def _param(self, name: str, *shape: int, tp_dim: int | None = None) -> StageParam:
        spec = self._spec(name, *shape)
        if len(shape) == 1:
            return StageParam(spec)
        return StageParam(spec, math.prod(shape), matrices=MatrixSpec.of(spec), tp_dim=tp_dim)

    def _spec(self, name: str, *shape: int) -> ParamSpec:
        return ParamSpec(name, math.prod(shape), shape, self.dtype)

    def _vocab_shape(self) -> tuple[int, int]:
        return self.gpt.padded_vocab(self.cut.tp) // self.cut.tp, self.gpt.hidden
