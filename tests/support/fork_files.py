"""An iteration folder as a fork of 2023 writes it, for any sizes of the parallel groups, without a
fork and quickly.

It is written here a second time, from what the forks do and not from what the package does: params
are cut with `torch.chunk`, a flat buffer is a `torch.cat`, a rank's shards are slices of it.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
EMBEDDING = "language_model.embedding.word_embeddings.weight"
VOCABULARY, HIDDEN = 8, 4


@dataclass(frozen=True)
class Whole:
    """A param of the whole model."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None  # along which tensor-parallel ranks cut it
    bands: int = 1  # matrices that lie one after the other along `dim`, each cut by itself

    def part(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """What one tensor-parallel rank has."""
        if self.dim is None:
            return tensor.clone()
        bands = tensor.chunk(self.bands, self.dim)
        return torch.cat([band.chunk(size, self.dim)[rank] for band in bands], self.dim)

    @property
    def decays(self) -> bool:
        return len(self.shape) > 1


@dataclass(frozen=True)
class Fork:
    """A run of a fork, and what it saves."""

    layout: str = "gathered"  # or "per-rank" or "plain"
    tp: int = 1
    pp: int = 1
    dp: int = 2
    chunks: int = 1  # of the model, on each stage
    layers: int = 2  # of the whole model
    dtype: torch.dtype = torch.bfloat16  # of the model params
    fp32_norms: bool = False  # among them
    swiglu: bool = False  # a gate beside the up projection
    # updates so far; None for a class that keeps it elsewhere, 0 for before the first one
    step: int | None = 10
    # of the fork, beside those that follow from the sizes
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # of all values

    @property
    def params(self) -> list[Whole]:
        """In the order in which the fork registers them."""
        hidden, ffn = HIDDEN, 8
        bands = 2 if self.swiglu else 1
        params = [
            Whole(EMBEDDING, (VOCABULARY, hidden), 0),
            Whole("language_model.embedding.position_embeddings.weight", (5, hidden)),
        ]
        for number in range(self.layers):
            layer = f"language_model.encoder.layers.{number}"
            params += [
                Whole(f"{layer}.input_layernorm.weight", (hidden,)),
                Whole(f"{layer}.self_attention.query_key_value.weight", (3 * hidden, hidden), 0),
                Whole(f"{layer}.self_attention.query_key_value.bias", (3 * hidden,), 0),
                Whole(f"{layer}.self_attention.dense.weight", (hidden, hidden), 1),
                Whole(f"{layer}.self_attention.dense.bias", (hidden,)),
                Whole(f"{layer}.mlp.dense_h_to_4h.weight", (ffn * bands, hidden), 0, bands),
                Whole(f"{layer}.mlp.dense_h_to_4h.bias", (ffn * bands,), 0, bands),
                Whole(f"{layer}.mlp.dense_4h_to_h.weight", (hidden, ffn), 1),
            ]
        return [*params, Whole("language_model.encoder.final_layernorm.weight", (hidden,))]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Of the whole model, by key; the model's values are the main params, rounded."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = {}
        for kind in ("main", *(MOMENTS if self.step != 0 else ())):
            for param in self.params:
                values = torch.randn(param.shape, generator=generator)
                tensors[f"{kind}/{param.name}"] = (
                    values.to(self.dtype_of(param)).float() if kind == "main" else values
                )
                if kind == "main" and self.dtype_of(param) is not torch.float32:
                    tensors[f"{kind}/{param.name}"] = values
        return tensors

    def dtype_of(self, param: Whole) -> torch.dtype:
        return torch.float32 if self.fp32_norms and "norm" in param.name else self.dtype

    def group(self, decays: bool) -> dict[str, Any]:
        """As apex's Adam has it, with a key of torch's that no other format keeps."""
        name = "wd_no_scale_lr" if decays else "no_wd_no_scale_lr"
        group = {
            "name": name,
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            "lr": 1e-3,
            "capturable": False,
        }
        group |= {
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1 * decays,
            "bias_correction": True,
        }
        return group if self.step is None else {**group, "step": self.step}

    def write(self, folder: Path) -> Path:
        """All files of an iteration."""
        for stage in range(self.pp):
            for rank in range(self.tp):
                _OneFile(self, stage, rank).write(folder)
        return folder


@dataclass(frozen=True)
class _Local:
    """A param in one model file: its name there, and its tensors by kind."""

    name: str
    param: Whole
    chunk: int
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.tensors["main"].numel()


@dataclass(frozen=True)
class _OneFile:
    """One tensor-parallel rank of one stage."""

    fork: Fork
    stage: int
    rank: int

    def write(self, folder: Path) -> None:
        name = f"mp_rank_{self.rank:02d}" + (f"_{self.stage:03d}" if self.fork.pp > 1 else "")
        model, scheduler = (
            self._model(),
            {"opt_param_scheduler": {"num_steps": 80, "lr_decay_style": "cosine"}},
        )
        (folder / name).mkdir(parents=True)
        if self.fork.layout == "per-rank":
            torch.save(model, folder / name / "model_rng.pt")
            for rank in range(self.fork.dp):
                (folder / f"{name}_{rank:03d}").mkdir()
                torch.save(
                    {"optimizer": self._own(rank), **scheduler},
                    folder / f"{name}_{rank:03d}" / "optim.pt",
                )
            return
        state = (
            self._plain()
            if self.fork.layout == "plain"
            else {"optimizer": {"param_groups": self._groups()}}
        )
        torch.save(
            {**model, "optimizer": {**state, **self._scaler()}, **scheduler},
            folder / name / "model_optim_rng.pt",
        )
        if self.fork.layout == "gathered":
            torch.save(self._gathered(), folder / name / "distrib_optim.pt")

    def _params(self) -> list[_Local]:
        return [local for chunk in range(self.fork.chunks) for local in self._chunk(chunk)]

    def _chunk(self, chunk: int) -> Iterator[_Local]:
        """Layers of a chunk follow those of the same chunk on the stage before."""
        fork, values = self.fork, self.fork.tensors
        here = fork.layers // (fork.pp * fork.chunks)
        first = (chunk * fork.pp + self.stage) * here
        is_last = (self.stage, chunk) == (fork.pp - 1, fork.chunks - 1)
        for param in fork.params:
            parts = param.name.split(".")
            number = int(parts[3]) if "layers" in parts else None
            is_here = number in range(first, first + here)
            if number is None:
                is_here = is_last if "final" in param.name else (self.stage, chunk) == (0, 0)
            if is_here:
                local = (
                    param.name
                    if number is None
                    else param.name.replace(f"s.{number}.", f"s.{number - first}.")
                )
                yield self._local(local, param, chunk, values)
        if is_last and fork.pp > 1:
            yield self._local("word_embeddings_for_head.weight", fork.params[0], chunk, values)

    def _local(self, name: str, param: Whole, chunk: int, values: Mapping[str, Tensor]) -> _Local:
        kinds = ("main", *MOMENTS) if self.fork.step != 0 else ("main",)
        cut = {
            kind: param.part(values[f"{kind}/{param.name}"], self.rank, self.fork.tp)
            for kind in kinds
        }
        return _Local(name, param, chunk, cut, self.fork.dtype_of(param))

    def _model(self) -> dict[str, Any]:
        """With a dict for each module, as the forks have it, and what is no param among the
        params."""
        fork, chunks = self.fork, {}
        for local in self._params():
            tree: dict[str, Any] = chunks.setdefault(
                local.chunk, {"language_model": {"moe_state_dict": {}}}
            )
            *modules, leaf = local.name.split(".")
            if "encoder" in modules:  # one flat dict
                modules, leaf = modules[:2], ".".join([*modules[2:], leaf])
            for module in modules:
                tree = tree.setdefault(module, {})
            tree[leaf] = local.tensors["main"].to(local.dtype)
        for tree in chunks.values():
            encoder = tree["language_model"].setdefault("encoder", {})
            encoder |= {"rotary.inv_freq": torch.ones(3), "layers.0._extra_state": None}
        sizes = {"tensor_model_parallel_size": fork.tp, "pipeline_model_parallel_size": fork.pp}
        sizes |= {"data_parallel_size": fork.dp, "num_layers": fork.layers, "swiglu": fork.swiglu}
        precision = {"bf16": fork.dtype is torch.bfloat16, "fp16": fork.dtype is torch.float16}
        precision["accumulate_allreduce_grads_in_fp32"] = fork.dtype is not torch.float16
        names = {number: f"model{number}" if fork.chunks > 1 else "model" for number in chunks}
        return {
            "args": Namespace(**{**sizes, **precision, **fork.options}),
            "checkpoint_version": 3.0,
            "iteration": 12,
            **{names[number]: tree for number, tree in chunks.items()},
            "rng_state": [
                {
                    "torch_rng_state": torch.arange(5, dtype=torch.uint8),
                    "random_rng_state": (3, (1, 2), None),
                }
            ],
        }

    def _groups(self) -> list[dict[str, Any]]:
        return [self.fork.group(decays) for decays in (True, False)]

    def _scaler(self) -> dict[str, Any]:
        scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
        return {"grad_scaler": scaler} if self.fork.dtype is torch.float16 else {}

    def _buffers(self) -> Iterator[tuple[int, torch.dtype, list[_Local]]]:
        """Grads are those of the params' own dtypes in fp16, and fp32 otherwise; the first param
        lies last."""
        in_own = self.fork.dtype is torch.float16
        by_place: dict[tuple[int, torch.dtype], list[_Local]] = {}
        for local in self._params():
            by_place.setdefault((local.chunk, local.dtype if in_own else torch.float32), []).append(
                local
            )
        yield from ((chunk, dtype, locals_[::-1]) for (chunk, dtype), locals_ in by_place.items())

    def _gathered(self) -> dict[Any, Any]:
        """The padding is what was in memory."""
        state: dict[Any, Any] = {}
        for chunk, dtype, in_buffer in self._buffers():
            padding = -sum(local.numel for local in in_buffer) % self.fork.dp
            flat = {
                ("param" if kind == "main" else kind): torch.cat(
                    [
                        *(local.tensors[kind].reshape(-1) for local in in_buffer),
                        torch.full((padding,), 7e7),
                    ]
                )
                for kind in in_buffer[0].tensors
            }
            state.setdefault(chunk, {})[dtype] = flat
        return state

    def _plain(self) -> dict[str, Any]:
        groups, state, mains, number = [], {}, [], 0
        for decays in (True, False):
            members = [local for local in self._params() if local.param.decays is decays]
            numbers = list(range(number, number + len(members)))
            number += len(members)
            groups.append({**self.fork.group(decays), "params": numbers})
            mains.append(
                [local.tensors["main"] for local in members if local.dtype is not torch.float32]
            )
            for at, local in zip(numbers, members, strict=True):
                state[at] = {kind: local.tensors[kind] for kind in MOMENTS if kind in local.tensors}
        inner = {"state": {at: kept for at, kept in state.items() if kept}, "param_groups": groups}
        if self.fork.dtype is torch.float32:
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": mains}

    def _own(self, rank: int) -> dict[str, Any]:
        """Of one data-parallel rank."""
        spans: dict[str, tuple[int, int]] = {}
        for _, _, in_buffer in self._buffers():
            size, start = math.ceil(sum(local.numel for local in in_buffer) / self.fork.dp), 0
            for local in in_buffer:
                begin, end = max(start, rank * size), min(start + local.numel, (rank + 1) * size)
                if begin < end:
                    spans[local.name + str(local.chunk)] = (begin - start, end - start)
                start += local.numel
        groups, state, mains, number = [], {}, [], 0
        for decays in (True, False):
            members = [local for local in self._params() if local.param.decays is decays]
            members = [local for local in members if local.name + str(local.chunk) in spans]
            members.sort(key=lambda local: local.dtype is not torch.float32)
            if not members:
                continue
            groups.append(
                {**self.fork.group(decays), "params": list(range(number, number + len(members)))}
            )
            mains.append([])
            for local in members:
                begin, end = spans[local.name + str(local.chunk)]
                cut = {
                    kind: tensor.reshape(-1)[begin:end].clone()
                    for kind, tensor in local.tensors.items()
                }
                main = cut.pop("main")
                mains[-1] += [main] if local.dtype is not torch.float32 else []
                state |= {number: cut} if cut else {}
                number += 1
        inner = {"state": state, "param_groups": groups}
        return {"optimizer": inner, "shard_fp32_from_float16_groups": mains, **self._scaler()}


class changed:
    """A file of `torch.save` to change, as a block: it is loaded before and saved after."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        self._state = torch.load(self._path, weights_only=False)
        return self._state

    def __exit__(self, *error: object) -> None:
        torch.save(self._state, self._path)


class Trap:
    """Whoever unpickles it calls a function; by default it makes the folder `argument`."""

    def __init__(self, argument: str, call: Callable[..., Any] = os.mkdir) -> None:
        self.argument, self.call = argument, call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)
