"""What ranks need of torch and find imported: optimizers and checkpoints import some of it when they are first used."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict  # noqa: F401

# Forked processes share these objects as long as no collection of garbage writes to them.
gc.freeze()
