"""Muon and AdamW over whole params, in the place of a Megatron's own Adam: what ours is compared
with.

Two formulas: torch's, by torch itself; and megatron-core's, written down once more from its
description.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tests.support.whole_classes import in_place_of_cores_adam, in_place_of_forks_adam

#: By scale_mode, of rows and columns.
SCALES = {
    "spectral": lambda rows, cols: max(rows, cols) ** 0.5,
    "shape_scaling": lambda rows, cols: max(1, rows / cols) ** 0.5,
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
}


class MegatronMuon(torch.optim.Optimizer):
    """megatron-core's formula for whole matrices, with one triple of coefficients for each step of
    the iteration."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        momentum = state.setdefault("momentum", torch.zeros_like(param))
        param.add_(param, alpha=-group["weight_decay"] * group["lr"])
        momentum.lerp_(param.grad, 1 - group["momentum"])
        direction = param.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = (
            orthogonalized(direction, group["coefficients"])
            * group["scale"](*param.shape)
            * group["extra"]
        )
        param.add_(update, alpha=-group["lr"])


def orthogonalized(matrix: Tensor, coefficients: Any) -> Tensor:
    """fp32; divided by its norm in fp32, multiplied in bfloat16."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    each = torch.nn.functional.normalize(wide, dim=(-2, -1), eps=1e-15).bfloat16()
    for a, b, c in coefficients:
        gram = each @ each.mT
        each = torch.addmm(each, torch.addmm(gram, gram, gram, alpha=c, beta=b), each, beta=a)
    found = each.float()
    return found.mT if wide is not matrix else found


@dataclass(frozen=True)
class Reference:
    """How the reference takes the params of a GPT."""

    is_megatrons: bool = False  # whose formula
    options: Mapping[str, Any] = field(default_factory=dict)  # of the formula
    split: bool = True  # queries, keys and values are matrices of their own
    splits_gates: bool = False  # gate and up projection are
    joins: bool = True  # tensor-parallel ranks put their parts together


@dataclass(frozen=True)
class Fused:
    """The weights of a host that consist of several matrices, by the ends of their names; the first
    that fits."""

    # rows of the parts in one group of heads
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # that are cut by themselves; one where nothing is said
    pieces: Mapping[str, int] = field(default_factory=dict)


class WholeMuon(torch.optim.Optimizer):
    """Stands where a host builds its Adam, whose params have a `name_in_test`."""

    reference: Reference
    fused: Fused

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **rest: Any
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )
        self._about = [
            [self._about_one(each) for each in group["params"]] for group in self.param_groups
        ]
        self._parts: dict[tuple[int, int], tuple[list[Parameter], Any]] = {}

    def _about_one(self, param: Any) -> tuple[str, int | None, bool]:
        """Its name, the dimension of which tensor-parallel ranks have parts, and whether Muon takes
        it."""
        is_outer = getattr(param, "is_embedding_or_output_parameter", False)
        is_ours = not is_outer if self.reference.is_megatrons else ".layers." in param.name_in_test
        dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
        return param.name_in_test, dim, is_ours and param.dim() == 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            for place, (param, about) in enumerate(
                zip(group["params"], self._about[number], strict=True)
            ):
                if param.grad is not None:
                    self._update((number, place), group, param, *about)

    def _update(
        self,
        key: tuple[int, int],
        group: dict[str, Any],
        param: Tensor,
        name: str,
        dim: int | None,
        is_matrix: bool,
    ) -> None:
        dim = dim if is_matrix and self.reference.joins else None
        sizes = _of_name(name, self.fused.sizes, ()) if is_matrix else ()
        pieces = _of_name(name, self.fused.pieces, 1)
        pairs = [
            _taken_apart(_gathered(each, name, dim, pieces), sizes)
            for each in (param.detach(), param.grad)
        ]
        if key not in self._parts:
            mains = [Parameter(part.clone()) for part in pairs[0]]
            self._parts[key] = mains, self._built(mains, group, is_matrix=is_matrix)
        mains, optimizer = self._parts[key]
        optimizer.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
        for main, value, grad in zip(mains, *pairs, strict=True):
            main.copy_(value)
            main.grad = grad.clone()
        optimizer.step()
        whole = _put_together([main.detach() for main in mains], sizes)
        param.copy_(_own(whole, name, dim, pieces))

    def _built(self, mains: list[Parameter], group: dict[str, Any], *, is_matrix: bool) -> Any:
        common = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if not is_matrix:
            return torch.optim.AdamW(
                mains, foreach=True, betas=group["betas"], eps=group["eps"], **common
            )
        formula = MegatronMuon if self.reference.is_megatrons else torch.optim.Muon
        return formula(mains, **common, **self.reference.options)


def _of_name(name: str, known: Mapping[str, Any], otherwise: Any) -> Any:
    return next((each for end, each in known.items() if name.endswith(end)), otherwise)


def _taken_apart(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    if not sizes:
        return [whole.contiguous()]
    runs = whole.unflatten(0, (-1, sum(sizes)))
    return [
        part.reshape(-1, whole.shape[1]).contiguous() for part in runs.split(list(sizes), dim=1)
    ]


def _put_together(parts: list[Tensor], sizes: Sequence[int]) -> Tensor:
    if not sizes:
        return parts[0]
    runs = [part.unflatten(0, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(runs, dim=1).flatten(0, 1)


def _group(name: str) -> Any:
    from megatron.core import mpu

    if "experts" in name.split(".") and hasattr(mpu, "get_expert_tensor_parallel_group"):
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def _gathered(part: Tensor, name: str, dim: int | None, pieces: int) -> Tensor:
    if dim is None or _group(name).size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(_group(name).size())]
    dist.all_gather(parts, part.contiguous(), group=_group(name))
    cut = [each.chunk(pieces, dim=dim) for each in parts]
    return torch.cat([each[piece] for piece in range(pieces) for each in cut], dim=dim)


def _own(whole: Tensor, name: str, dim: int | None, pieces: int) -> Tensor:
    if dim is None or _group(name).size() == 1:
        return whole
    parts = [each.chunk(_group(name).size(), dim=dim) for each in whole.chunk(pieces, dim=dim)]
    return torch.cat([each[_group(name).rank()] for each in parts], dim=dim)


def name_params(model: torch.nn.Module) -> None:
    """Writes the name of each param where `WholeMuon` reads it."""
    for name, param in model.named_parameters():
        param.name_in_test = name  # type: ignore[attr-defined]


def _fused_of(model: Any, reference: Reference) -> Fused:
    """Of megatron-core, by a model's config."""
    width, queries = (
        model.kv_channels,
        model.num_attention_heads // model.num_query_groups * model.kv_channels,
    )
    sizes = {"linear_qkv.weight": (queries, width, width)} if reference.split else {}
    sizes |= {"linear_fc1.weight": (model.ffn_hidden_size,) * 2} if reference.splits_gates else {}
    return Fused(sizes, {"linear_fc1.weight": 2} if model.gated_linear_unit else {})


@contextlib.contextmanager
def in_place_of_adam(reference: Reference) -> Iterator[None]:
    """In the block megatron-core's trainings without sharding use the reference."""
    from tests.support import gpt

    def build(case: Any) -> Any:
        chunks = original(case)
        WholeMuon.reference, WholeMuon.fused = reference, _fused_of(chunks[0].config, reference)
        for chunk in chunks:
            name_params(chunk)
        return chunks

    original = gpt.build_chunks
    with in_place_of_cores_adam(WholeMuon), mock.patch.object(gpt, "build_chunks", build):
        yield


@contextlib.contextmanager
def layer_wise_buffers() -> Iterator[None]:
    """In the block megatron-core's chunks are wrapped as `wrap_model_chunks_with_ddp` of
    megatron.training does it."""
    from tests.support import gpt

    def wrap(config: Any, ddp_config: Any, model: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.optimizer import layer_wise_optimizer

        layer_wise_optimizer.tag_params_for_buffer_routing([model])
        layout = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(model.parameters()),
            ddp_config.bucket_size,
            parallel_state.get_data_parallel_world_size(),
            ddp_config,
        )
        return original(config, ddp_config, model, full_param_layout=layout, **kwargs)

    original = gpt.DistributedDataParallel
    with mock.patch.object(gpt, "DistributedDataParallel", wrap):
        yield


@contextlib.contextmanager
def in_the_fork(script: Any, reference: Reference, *, repaired: bool = False) -> Iterator[None]:
    """In the block the trainings of a fork of 2023 without sharding, whose `script` provides
    models, use the reference.

    For `repaired` see test_megatron_2023_numerics.py.
    """
    from megatron import get_args

    def provide(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        # Queries, keys and values of a head one after the other; keys and values alone where heads
        # share them.
        width = get_args().hidden_size // get_args().num_attention_heads
        sizes = {"query_key_value.weight": (width,) * 3, "key_value.weight": (width,) * 2}
        WholeMuon.fused = Fused(sizes if reference.split else {})
        name_params(model)
        return model

    original, WholeMuon.reference = script.model_provider, reference
    with (
        in_place_of_forks_adam(WholeMuon, repaired=repaired),
        mock.patch.object(script, "model_provider", provide),
    ):
        yield
