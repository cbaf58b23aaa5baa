"""The params of one rank of a Megatron GPT: names and shapes of megatron-core, in the order of registration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_distopt.layout import ParamSpec
from megatron_distopt.plugin.commands.plan_model import Cut, GptSizes

__all__ = ["StageParam", "stage_params"]


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
        """Whether Megatron decays it: matrices only."""
        return len(self.spec.shape) > 1


def stage_params(gpt: GptSizes, cut: Cut, stage: int, dtype: str) -> tuple[StageParam, ...]:
    """What a rank of one pipeline stage registers.

    Args:
        gpt, cut: agree with each other, see `check_cut`.
        stage: from 0.
        dtype: of all params, e.g. "bfloat16".
    """
    return tuple(_Rank(gpt, cut, dtype).stage(stage))


@dataclass(frozen=True)
class _Rank:
    gpt: GptSizes
    cut: Cut
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
        """Its input is cut; its bias, which is added to the sum, is whole on every rank."""
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
