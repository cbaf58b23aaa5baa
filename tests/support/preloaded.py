"""What ranks find imported: optimizers, checkpoints and megatron-core import it when they are used."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

# Forked processes share these objects as long as no collection of garbage writes to them.
gc.freeze()
