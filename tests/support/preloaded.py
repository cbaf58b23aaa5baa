"""What ranks find imported: most of them train, with what this package, optimizers and checkpoints import for that."""

from __future__ import annotations

import contextlib
import gc

import pytest  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

import megatron_distopt.formats.conversion
import megatron_distopt.hosts.torch.distribute  # noqa: F401

with contextlib.suppress(ImportError):
    import deepspeed.accelerator  # noqa: F401 - which names the device, unless torch is asked to

# Forked processes share these objects as long as no collection of garbage writes to them.
gc.freeze()
