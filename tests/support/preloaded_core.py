"""What ranks of megatron-core's tests find imported as well: the host, which each of them would
take seconds for."""

from __future__ import annotations

import gc

import tests.support.gpt
import tests.support.preloaded  # noqa: F401

gc.freeze()
