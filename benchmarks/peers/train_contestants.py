"""All contestants of train.py, overlap.py and memory.py, in the order in which a round runs
them."""

from __future__ import annotations

import logging
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from peers.adam import ADAM, CLIP_GRAD, torch_adam
from peers.core_optimizer import CoreOptimizer
from peers.state import groups_of
from peers.trainers import ForkTrainer, Forward, ForwardBackward, Ours, TrainEntry, Trainer
from peers.transformer import TrainSetting, transformer


class Core(Trainer):
    """megatron-core with both overlaps, around the same module; for `is_fused` see [Note: its
    Adam]."""

    def __init__(self, setting: TrainSetting, *, is_fused: bool = False) -> None:
        self._core = CoreOptimizer(
            transformer(setting), bucket_size=setting.bucket_size, is_fused=is_fused
        )

    def train(self, tokens: Tensor) -> Tensor:
        self._core.zero_grad()
        loss = self._core.model(tokens)
        loss.backward()
        self._core.model.finish_grad_sync()
        self._core.optimizer.step()
        return loss.detach()

    def finish(self) -> None:
        self._core.model.start_param_sync(force_sync=True)

    def close(self) -> None:
        self._core.close()


class DeepSpeedZero(Trainer):
    """DeepSpeed's engine with a stage of ZeRO.

    Args:
        setting: of model and data.
        stage: 1 or 2.
        wire: what gradients are reduced in; "fp32" as the others do, or "bf16" as it does where
            nothing is said.
    """

    def __init__(self, setting: TrainSetting, stage: int, wire: str = "fp32") -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model = transformer(setting)
        adam = torch_adam(fused=True)(groups_of(model))
        config = {
            "train_micro_batch_size_per_gpu": setting.sequences,
            "bf16": {"enabled": True},
            "communication_data_type": wire,
            "gradient_clipping": CLIP_GRAD,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": True,
                "reduce_bucket_size": setting.bucket_size,
                "allgather_bucket_size": setting.bucket_size,
            },
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        self._engine = deepspeed.initialize(model=model, optimizer=adam, config=config)[0]

    def train(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._engine(tokens)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        self._engine.destroy()


class TorchTrainer(Trainer):
    """What torch has of its own: fp32 params that are computed with in bf16."""

    def __init__(self, model: Module, optimizer: Optimizer, *, has_autocast: bool) -> None:
        self._model, self._optimizer, self._has_autocast = model, optimizer, has_autocast

    def train(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self._has_autocast):
            loss: Tensor = self._model(tokens)
        loss.backward()
        clip_grad_norm_(self._model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        return loss.detach()


class DataParallel(TorchTrainer):
    """DistributedDataParallel under autocast and a fused AdamW: nothing is sharded, fp32 grads are
    reduced."""

    def __init__(self, setting: TrainSetting) -> None:
        model = transformer(setting, torch.float32)
        nbytes = 4 * setting.bucket_size
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=nbytes / 2**20, gradient_as_bucket_view=True
        )
        super().__init__(wrapped, self._optimizer_of(groups_of(model)), has_autocast=True)

    def _optimizer_of(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch_adam(fused=True)(groups)


class ZeroRedundancy(DataParallel):
    """The same with ZeroRedundancyOptimizer: fp32 params go over the wire, too."""

    def _optimizer_of(self, groups: list[dict[str, Any]]) -> Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # It takes one group when it is made, and more afterwards.
        optimizer = ZeroRedundancyOptimizer(
            groups[0]["params"],
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            fused=True,
            **ADAM,
        )
        for group in groups[1:]:
            optimizer.add_param_group(group)
        return optimizer


class FullyShard(TorchTrainer):
    """FSDP2 that keeps the gathered params until the update, as ZeRO stage 2 does: bf16 gathered,
    fp32 reduced."""

    def __init__(self, setting: TrainSetting) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = transformer(setting, torch.float32)
        mesh = init_device_mesh(setting.device.partition(":")[0], (setting.size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        super().__init__(model, torch_adam(fused=True)(groups_of(model)), has_autocast=False)


class Compressed(DataParallel):
    """DistributedDataParallel that computes in fp32, with a hook of torch's that sends less.

    Its bf16 hook refuses everything but NCCL and XCCL, so the 16 bits are those of fp16. PowerSGD
    begins collectives as others end: with several buckets in another order on each rank, which gloo
    does not survive, so it has one bucket.
    """

    def __init__(self, setting: TrainSetting, hook: str) -> None:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        super().__init__(setting if hook == "fp16" else replace(setting, bucket_size=setting.numel))
        self._has_autocast = False
        if hook == "fp16":
            self._model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        else:
            # Its first two steps are not compressed.
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            self._model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


#: This package as it exchanges between machines, also where its ranks could share memory.
MESSAGES = "ours, messages"
BOTH_OVERLAPS = "ours, both overlaps"

_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}

FORWARD = TrainEntry("forward alone", Forward, trains=False)
FORWARD_BACKWARD = TrainEntry("forward and backward alone", ForwardBackward, trains=False)

ENTRIES: tuple[TrainEntry, ...] = (
    TrainEntry("ours", Ours),
    TrainEntry("ours, overlap", partial(Ours, overlap_grad_reduce=True)),
    TrainEntry(BOTH_OVERLAPS, partial(Ours, overlap_grad_reduce=True, overlap_param_gather=True)),
    TrainEntry(MESSAGES, partial(Ours, shared_memory=False)),
    TrainEntry("fork of 2023", partial(ForkTrainer, adam=torch_adam(foreach=False))),
    TrainEntry("fork of 2023, fused Adam", partial(ForkTrainer, adam=torch_adam(fused=True))),
    TrainEntry("megatron-core", Core),
    TrainEntry("megatron-core, fused Adam", partial(Core, is_fused=True)),
    TrainEntry("DeepSpeed ZeRO-1", partial(DeepSpeedZero, stage=1)),
    TrainEntry("DeepSpeed ZeRO-2", partial(DeepSpeedZero, stage=2)),
    TrainEntry("DeepSpeed ZeRO-2, bf16 wire", partial(DeepSpeedZero, stage=2, wire="bf16")),
    TrainEntry("torch DDP + ZeroRedundancy", ZeroRedundancy),
    TrainEntry("torch FSDP2", FullyShard),
)

FP32, BF16 = "ours, fp32", "ours, bf16"
#: Those of slow_networks.py.
REDUCING_ENTRIES: tuple[TrainEntry, ...] = (
    TrainEntry(FP32, Ours),
    TrainEntry("ours, fp32 once a node", partial(Ours, reduce_dtype="float32")),
    TrainEntry(BF16, partial(Ours, reduce_dtype="bfloat16")),
    TrainEntry("ours, bf16, both overlaps", partial(Ours, reduce_dtype="bfloat16", **_OVERLAPS)),
    TrainEntry("torch DDP, fp16 hook", partial(Compressed, hook="fp16")),
    TrainEntry("torch DDP, PowerSGD of rank 4", partial(Compressed, hook="PowerSGD")),
    TrainEntry("DeepSpeed ZeRO-1, bf16 wire", partial(DeepSpeedZero, stage=1, wire="bf16")),
)


def train_entries(ours: Sequence[str]) -> tuple[TrainEntry, ...]:
    """All contestants, and this package once more with other options.

    Args:
        ours: "name=value" of `DistOptConfig`, values as in Python; none for no further contestant.
    """
    options = {
        name: literal_eval(value) for name, _, value in (word.partition("=") for word in ours)
    }
    more = (TrainEntry("ours, " + " ".join(ours), partial(Ours, **options)),) if ours else ()
    return (ENTRIES[0], *more, *ENTRIES[1:])
