"""megatron-core's DistributedDataParallel and distributed optimizer around any module, on a CPU.

[Note: its Adam] Where neither TransformerEngine nor apex is there, it makes
`torch.optim.AdamW(...)` and does not say how that is to run; on a CPU that is torch's loop over
tensors. No option of its own changes it, but the optimizer inside can be told to run fused before
its first step, which a user could do, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

import megatron_distopt
from peers.adam import ADAM, CLIP_GRAD


class CoreOptimizer:
    """With both of its overlaps: reduce-scatter under backward, all-gather under the next forward.

    What examples/megatron_on_cpu.py changes in torch is put back by `close`, so that others do not
    run with it.

    Args:
        module: bf16.
        bucket_size: elements of a bucket.
        loss_scale: constant; None for none.
        is_fused: see [Note: its Adam].
        kind: "distributed" or "plain" for its own optimizers, "ours" for this package in the place
            of the first.
        fields: more of its OptimizerConfig. For ours they are set behind the host's check, which
            asks for a package.
    """

    def __init__(
        self,
        module: Module,
        *,
        bucket_size: int,
        loss_scale: float | None = None,
        is_fused: bool = False,
        kind: str = "distributed",
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        import megatron_on_cpu

        with ExitStack() as undo:
            undo.enter_context(megatron_on_cpu.install())
            if kind == "ours":
                undo.callback(megatron_distopt.install().undo)
            else:
                undo.enter_context(megatron_on_cpu.map_type_strings())
            self._wrap(module, bucket_size, is_distributed=kind != "plain")
            self._build(loss_scale, fields, is_distributed=kind != "plain", is_ours=kind == "ours")
            if is_fused:
                _fuse(self.optimizer.optimizer)
            self._undo = undo.pop_all()

    def _wrap(self, module: Module, bucket_size: int, *, is_distributed: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1}
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=is_distributed,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=is_distributed,
            bucket_size=bucket_size,
        )
        self.model = DistributedDataParallel(TransformerConfig(**shape, bf16=True), ddp, module)

    def _build(
        self,
        loss_scale: float | None,
        fields: Mapping[str, Any],
        *,
        is_distributed: bool,
        is_ours: bool,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        (beta1, beta2), rates = (
            ADAM["betas"],
            {"lr": ADAM["lr"], "weight_decay": ADAM["weight_decay"]},
        )
        adam = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": ADAM["eps"], **rates}
        config = OptimizerConfig(
            optimizer="adam",
            bf16=True,
            use_distributed_optimizer=is_distributed,
            clip_grad=CLIP_GRAD,
            loss_scale=loss_scale,
            **adam,
            **({} if is_ours else fields),
        )
        for name, value in fields.items() if is_ours else ():
            setattr(config, name, value)
        self.optimizer = get_megatron_optimizer(config, [self.model])
        for group in self.optimizer.param_groups:
            # Its scheduler does it at every step.
            group["weight_decay"] = ADAM["weight_decay"] * group["wd_mult"]

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self._undo.close()
        del self.optimizer, self.model


def _fuse(adam: Optimizer) -> None:
    """From its first step on: its state is laid out for that then."""
    for options in (adam.defaults, *adam.param_groups):
        options["fused"] = True
