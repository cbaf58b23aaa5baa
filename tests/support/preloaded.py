"""What ranks find imported: most of them train, with what this package, optimizers and checkpoints
import for that."""

from __future__ import annotations

import gc

gc.disable()  # it would look through a million objects again and again

import pytest  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

import megatron_distopt.formats.conversion
import megatron_distopt.hosts.torch.get_in
import megatron_distopt.patch_points
import megatron_distopt.plugin.install  # noqa: F401

# Forked processes share these objects as long as no collection of garbage writes to them.
gc.freeze()
gc.set_threshold(10_000, 10, 10)
gc.enable()
