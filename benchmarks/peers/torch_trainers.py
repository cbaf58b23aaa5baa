"""Whole training steps by torch's own distributed optimizers. Both keep fp32 params and compute in bf16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from peers.adam import ADAM, CLIP_GRAD
from peers.state import groups_of
from peers.trainers import Trainer
from peers.transformer import TrainSetting, transformer


class ZeroRedundancy(Trainer):
    """DistributedDataParallel with ZeroRedundancyOptimizer, under autocast: it has no main params of its own.

    fp32 grads and fp32 params go over the wire.
    """

    def __init__(self, setting: TrainSetting) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = transformer(setting, torch.float32)
        nbytes = 4 * setting.bucket_size
        self._model = DistributedDataParallel(model, bucket_cap_mb=nbytes / 2**20, gradient_as_bucket_view=True)
        first, *rest = groups_of(model)
        # It takes one group when it is made, and more afterwards.
        self._optimizer = ZeroRedundancyOptimizer(
            first["params"], optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAM
        )
        for group in rest:
            self._optimizer.add_param_group(group)

    def train(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = self._model(tokens)
        loss.backward()
        clip_grad_norm_(self._model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        return loss.detach()


class FullyShard(Trainer):
    """FSDP2 that keeps the gathered params until the update, as ZeRO stage 2 does: bf16 gathered, fp32 reduced."""

    def __init__(self, setting: TrainSetting) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._model = transformer(setting, torch.float32)
        mesh = init_device_mesh(setting.device.partition(":")[0], (setting.size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*self._model.blocks, self._model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._optimizer = torch.optim.AdamW(groups_of(self._model), fused=True, **ADAM)

    def train(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._model(tokens)
        loss.backward()
        clip_grad_norm_(self._model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        return loss.detach()
