"""Moves optimizer state off its device between two phases of training, and back with the same bits.

Frameworks for reinforcement learning need the memory of the device while they generate.
megatron-core has `offload_to_cpu` and `restore_from_cpu` since 0.15. verl moves the tensors of
`shard_fp32_from_float16_groups` and the moments by assigning to their `data` and to the entries of
`optimizer.state`. Both move the same tensors, each of which has memory of its own. fp32 params are
their own main params and stay in the host's param buffers, which the host and these frameworks
offload themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.device import empty_cache
from megatron_distopt.errors import LayoutError
from megatron_distopt.optimizer.inner_state import begin_counts, state_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import LowPrecisionTensor
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import ShardedOptimizer


def _is_emptied(tensor: Tensor, numel: int) -> bool:
    """Whether a tensor of a flat param of `numel` elements has lost its values."""
    if isinstance(tensor, LowPrecisionTensor):
        tensor = tensor.stored.parts[0]
    is_freed = tensor.numel() > 0 and not tensor.is_meta and tensor.untyped_storage().nbytes() == 0
    return tensor.is_meta or is_freed or (tensor.numel() == 0 and numel > 0)


class OffloadedState:
    """Moves the state of one optimizer away and back, in whatever precision it is stored.

    State in low precision moves as it is stored, and every tensor that shows its values follows.
    State that is always on the host (optimizer/offload.py) stays there.
    """

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self._sharded = sharded

    def move_to(self, device: torch.device) -> None:
        """Moves main params and the state that the inner optimizer keeps for each element to a
        device."""
        flat_params = [flat for flat in self._sharded.flat_params if flat.on_host is None]
        for flat, state, name in self._entries(flat_params):
            if isinstance(state[name], LowPrecisionTensor):
                state[name].move_to(device)
            elif state[name].shape == flat.main.shape:
                state[name] = state[name].to(device)
        for flat in flat_params:
            if isinstance(flat.main, LowPrecisionTensor):
                flat.main.move_to(device)
            elif flat.owns_memory:
                flat.main.data = flat.main.data.to(device)
            if flat.average is not None:
                flat.average.data = flat.average.data.to(device)
        empty_cache(self._sharded.device)

    def check_is_there(self) -> None:
        """Refuses state that other code has emptied or cut: a save and a load need its values, on
        whatever device.

        Adds missing update counts to state that other code has created.
        """
        begin_counts(self._sharded.inner)
        flat_params = self._sharded.flat_params
        mains = [
            (flat, "a main param", flat.main)
            for flat in flat_params
            if type(flat.main) is not LowPrecisionTensor
        ]
        entries = [(flat, name, state[name]) for flat, state, name in self._entries(flat_params)]
        for flat, name, tensor in (*mains, *entries):
            if _is_emptied(tensor, flat.plan.in_buffer.numel):
                raise LayoutError(
                    f"Optimizer state was emptied: {name} has no values. First call your "
                    "framework's function that loads it again."
                )
            if tensor is flat.main and (
                tensor.numel() != flat.plan.in_buffer.numel or tensor.dtype != torch.float32
            ):
                raise LayoutError(
                    f"A main param of {flat.plan.in_buffer.numel} fp32 elements is now "
                    f"{tensor.dtype} {list(tensor.shape)}. It must keep its dtype and number of "
                    "elements: assign only copies of it on another device."
                )

    def check_is_back(self) -> None:
        """Refuses state that was emptied, or is not on the device where an update needs it.

        Frameworks move all moments to the device. Moments that belong on the host are moved back
        there.
        """
        self.check_is_there()
        flat_params = self._sharded.flat_params
        tensors = [
            (flat, flat.main) for flat in flat_params if flat.on_host is None and flat.owns_memory
        ]
        for flat, state, name in self._entries(flat_params):
            if flat.on_host is not None:
                state[name] = state[name].to(flat.main.device)
            elif state[name].shape == flat.main.shape:
                tensors.append((flat, state[name]))
        for flat, tensor in tensors:
            # A low-precision tensor itself names the device on which it was made.
            found = (
                tensor.stored.device if isinstance(tensor, LowPrecisionTensor) else tensor.device
            )
            if found != flat.model.device:
                raise LayoutError(
                    f"Optimizer state is on {found}, but a step needs it on {flat.model.device}. "
                    "Before the step, call optimizer.restore_from_cpu() or your framework's "
                    "function for it."
                )

    def _entries(
        self, flat_params: Iterable[FlatParam]
    ) -> Iterator[tuple[FlatParam, dict[str, Any], str]]:
        """Every tensor that the inner optimizer keeps: its flat param, its dict and its key
        there."""
        for flat in flat_params:
            state = state_of(self._sharded.inner, flat.main)
            yield from ((flat, state, name) for name in list(state) if torch.is_tensor(state[name]))
