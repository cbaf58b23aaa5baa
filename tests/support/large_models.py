"""Params of models of public sizes, and which of them are matrices for an optimizer such as Muon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_distopt.layout import MatrixSpec, ParamSpec

__all__ = ["LARGE_MODELS", "LargeModel", "matrices_of", "params_of"]


@dataclass(frozen=True)
class LargeModel:
    """A decoder with gated MLPs, grouped attention and no biases.

    Args:
        layers, hidden, ffn, kv_width, vocab: its sizes.
        experts: in each layer; 0 for one MLP.
        is_fused: whether queries, keys and values are one param, and gate and up projection another, as in Megatron.
        groups: of heads that share a key and a value.
    """

    layers: int
    hidden: int
    ffn: int
    kv_width: int
    vocab: int = 32000
    experts: int = 0
    is_fused: bool = False
    groups: int = 8


LARGE_MODELS = {
    "LLaMA 7B": LargeModel(32, 4096, 11008, 4096),
    "LLaMA 7B, fused": LargeModel(32, 4096, 11008, 4096, is_fused=True, groups=32),
    "LLaMA 70B": LargeModel(80, 8192, 28672, 1024),
    "Mixtral 8x7B": LargeModel(32, 4096, 14336, 1024, experts=8),
}

_Named = Iterator[tuple[str, tuple[int, ...], MatrixSpec | None]]


def params_of(model: LargeModel) -> tuple[ParamSpec, ...]:
    """In the reverse order of registration, which is roughly that of backward."""
    found = [ParamSpec(name, math.prod(shape), shape, "bfloat16") for name, shape, _ in _named(model)]
    return tuple(reversed(found))


def matrices_of(model: LargeModel) -> Mapping[str, MatrixSpec]:
    """All matrices but embedding, output layer and routers, which are usually left to AdamW."""
    return {name: spec for name, _, spec in _named(model) if spec is not None}


def _named(model: LargeModel) -> _Named:
    yield "embedding", (model.vocab, model.hidden), None
    for layer in range(model.layers):
        for name, shape, spec in _layer(model):
            yield f"{layer}.{name}", shape, spec
    yield "norm", (model.hidden,), None
    yield "output", (model.vocab, model.hidden), None


def _layer(model: LargeModel) -> _Named:
    yield "input_norm", (model.hidden,), None
    yield from _attention(model)
    yield "post_norm", (model.hidden,), None
    if model.experts:
        yield "router", (model.experts, model.hidden), None
    for expert in range(model.experts) if model.experts else ("mlp",):
        for name, shape, spec in _mlp(model):
            yield f"{expert}.{name}", shape, spec


def _attention(model: LargeModel) -> _Named:
    hidden, kv = model.hidden, model.kv_width
    if model.is_fused:
        sizes = [width // model.groups for width in (hidden, kv, kv)]
        yield _matrix("qkv", hidden + 2 * kv, hidden, sizes, repeats=model.groups)
    else:
        yield from (_matrix("q", hidden, hidden), _matrix("k", kv, hidden), _matrix("v", kv, hidden))
    yield _matrix("o", hidden, hidden)


def _mlp(model: LargeModel) -> _Named:
    hidden, ffn = model.hidden, model.ffn
    if model.is_fused:
        yield _matrix("gate_up", 2 * ffn, hidden, (ffn, ffn))
    else:
        yield from (_matrix("gate", ffn, hidden), _matrix("up", ffn, hidden))
    yield _matrix("down", hidden, ffn)


def _matrix(
    name: str, rows: int, cols: int, sizes: Sequence[int] = (), repeats: int = 1
) -> tuple[str, tuple[int, int], MatrixSpec]:
    return name, (rows, cols), MatrixSpec(rows, cols, sizes=tuple(sizes), repeats=repeats)
