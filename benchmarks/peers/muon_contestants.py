"""Muon on several ranks: ours, megatron-core's layer-wise optimizer, and torch's on every rank
alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from peers.adam import ADAM, CLIP_GRAD
from peers.state import fill
from peers.steppers import StepEntry, Stepper, StepSetting

_MUON = {"lr": ADAM["lr"], "weight_decay": ADAM["weight_decay"], "adjust_lr_fn": "match_rms_adamw"}


class MuonStepper(Stepper):
    """Muon for matrices and AdamW for the rest, each rank with the same gradients.

    Attributes:
        update_seconds: CPU time of this process in its optimizers' own steps so far, with what they
            send.
    """

    update_seconds = 0.0

    def set_grads(self, norm: float) -> None:
        """Leaves gradients of a given norm by a backward, the same on every rank and for all
        contestants."""
        factor = norm / self.setting.numel**0.5
        drawn = [fill(torch.empty_like(param)).mul_(factor) for param in self.params]
        torch.stack(
            [(param * grad).sum() for param, grad in zip(self.params, drawn, strict=True)]
        ).sum().backward()

    def _timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return step(*args, **kwargs)
            finally:
                self.update_seconds += time.process_time() - start

        return timed


def _by_kind(params: Iterable[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Matrices and the rest."""
    both = list(params)
    return [each for each in both if each.ndim == 2], [each for each in both if each.ndim != 2]


def _both(params: Iterable[Parameter]) -> list[Optimizer]:
    matrices, rest = _by_kind(params)
    adamw = torch.optim.AdamW(rest, **{**ADAM, "weight_decay": 0.0}, fused=True)
    return [torch.optim.Muon(matrices, **_MUON), adamw]


class OursMuon(MuonStepper):
    """This package through its documented calls; reduce-scatter and all-gather are a part of its
    step."""

    def __init__(self, setting: StepSetting) -> None:
        from megatron_distopt import DistOptConfig, distribute

        super().__init__(setting)
        config = DistOptConfig(accelerator="torch", clip_grad=CLIP_GRAD)
        self._optimizer = distribute(self.model, _both(self.model.parameters()), config)
        inner = self._optimizer.sharded.inner
        inner.step = self._timed(inner.step)  # type: ignore[method-assign]

    def grads(self) -> Sequence[Tensor]:
        """The buffer."""
        return [buffer.grad for buffer in self._optimizer.sharded.buffers]

    def set_grads(self, norm: float) -> None:
        self._optimizer.zero_grad()
        super().set_grads(norm)

    def step(self) -> None:
        self._optimizer.step()


class TorchMuon(MuonStepper):
    """`torch.optim.Muon` with fp32 main params; every rank updates everything, and nothing is
    sent."""

    def __init__(self, setting: StepSetting) -> None:
        super().__init__(setting)
        self._mains = [Parameter(param.detach().float()) for param in self.params]
        self._grads = [torch.zeros_like(main) for main in self._mains]
        self._optimizers = _both(self._mains)

    def grads(self) -> Sequence[Tensor]:
        return self._grads

    def set_grads(self, norm: float) -> None:
        super().set_grads(norm)
        for param, main, grad in zip(self.params, self._mains, self._grads, strict=True):
            main.grad = grad.copy_(param.grad)
            param.grad = None

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._mains, CLIP_GRAD, foreach=True)
        for optimizer in self._optimizers:
            self._timed(optimizer.step)()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self._mains)


class LayerWise(MuonStepper):
    """megatron-core's LayerWiseDistributedOptimizer over its own buffers, with `torch.optim.Muon`
    in its Muon's place.

    Its own Muon comes from the package emerging_optimizers, which is not on PyPI.
    """

    def __init__(self, setting: StepSetting) -> None:
        import megatron_on_cpu

        super().__init__(setting)
        with ExitStack() as undo:
            undo.enter_context(megatron_on_cpu.install())
            undo.enter_context(megatron_on_cpu.map_type_strings())
            self._ddp = _wrapped(self.model)
            self._optimizer = _layer_wise(self._ddp)
            self._undo = undo.pop_all()
        for part in _parts_of(self._optimizer):
            part.optimizer.step = self._timed(part.optimizer.step)

    def set_grads(self, norm: float) -> None:
        self._ddp.zero_grad_buffer()
        super().set_grads(norm)

    def step(self) -> None:
        self._ddp.start_grad_sync()
        self._ddp.finish_grad_sync()
        self._optimizer.step()

    def close(self) -> None:
        self._undo.close()
        del self._ddp, self._optimizer


def _wrapped(module: Module) -> Any:
    """As megatron.training wraps a model for that optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    tag_params_for_buffer_routing([module])
    layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(module.parameters()),
        ddp.bucket_size,
        parallel_state.get_data_parallel_world_size(),
        ddp,
    )
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True)
    return DistributedDataParallel(config, ddp, module, full_param_layout=layout)


def _layer_wise(ddp: Any) -> Any:
    from megatron.core import optimizer as core

    beta1, beta2 = ADAM["betas"]
    config = core.OptimizerConfig(
        optimizer="muon",
        bf16=True,
        clip_grad=CLIP_GRAD,
        lr=ADAM["lr"],
        weight_decay=ADAM["weight_decay"],
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=ADAM["eps"],
        use_distributed_optimizer=False,
        use_layer_wise_distributed_optimizer=True,
    )
    with _with_torchs_muon(core):
        return core.get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)


@contextmanager
def _with_torchs_muon(core: Any) -> Iterator[None]:
    """In the block the host finds a Muon."""
    from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry

    def build(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        kept = [{"params": group["params"]} for group in groups]
        muon = torch.optim.Muon(kept, **_MUON)
        for group, given in zip(muon.param_groups, groups, strict=True):
            group.update({key: value for key, value in given.items() if key not in group})
        return muon

    entry = EmergingOptimizerEntry(build, lambda *_: None, lambda *_: {})
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(core, "HAVE_EMERGING_OPTIMIZERS", True))
        undo.enter_context(mock.patch.dict(core._EMERGING_OPTIMIZERS, {"muon": entry}))
        yield


def _parts_of(optimizer: Any) -> Iterator[Any]:
    """Those that a chain of chains consists of."""
    for part in getattr(optimizer, "chained_optimizers", ()):
        if hasattr(part, "chained_optimizers"):
            yield from _parts_of(part)
        else:
            yield part


def entries() -> tuple[StepEntry, ...]:
    """In the order in which a round runs them; ours is first."""
    return (
        StepEntry("ours", OursMuon),
        StepEntry("megatron-core, layer-wise", LayerWise),
        StepEntry("torch, every rank alone", TorchMuon),
    )
