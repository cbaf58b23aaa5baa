"""The buffers of modules, which training may change differently on each rank.

[Note: module buffers] Module buffers that training changes, such as the running statistics of a
batch norm, follow the first rank. torch's DistributedDataParallel broadcasts all module buffers
before each forward pass. Here the changing ones are broadcast after each step, so every forward
pass begins with the same values as under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import Field, Group, all_gather_objects, compare, share_initial
from megatron_distopt.hosts.torch.ddp import is_ignored
from megatron_distopt.hosts.watches.version_census import VersionCensus

#: What to do where module buffers differ between ranks.
KEEP_BUFFERS = ", or write broadcast_buffers=False so that each rank keeps its own"


def modules_with_buffers(chunks: Sequence[Module]) -> dict[str, Module]:
    """Modules that have buffers, by their chunk's number and their name there."""
    return {
        f"{number}.{name}": module
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if module._buffers
    }


class ModuleBuffers:
    """The buffers of modules on this rank, see [Note: module buffers]."""

    def __init__(self, modules: Mapping[str, Module], data: Group, device: torch.device) -> None:
        self._modules, self._data, self._device = modules, data, device
        #: By name, the dtypes and shapes of the buffers of modules whose buffers change; the same
        #: on all ranks.
        self._changing: dict[str, tuple[str, ...]] = {}
        #: Buffers that DDP was asked to ignore, by their modules and names there.
        self._ignored = {
            (module, key)
            for module in modules.values()
            for key, buffer in module._buffers.items()
            if is_ignored(buffer)
        }
        self._seen = {name: VersionCensus(self._buffers_of(name)) for name in modules}
        # The kernels of torch's norms change running statistics without counting a version.
        self.learn(
            [
                name
                for name, module in modules.items()
                if isinstance(module, _NormBase) and module.track_running_stats
            ]
        )

    def begun(self) -> list[str]:
        """Modules whose buffers have changed for the first time, or have a new shape or dtype.
        Ranks may return different ones."""
        return [name for name in self._modules if self._has_begun(name)]

    def _has_begun(self, name: str) -> bool:
        if name in self._changing:
            return self._changing[name] != self._described(name)
        return bool(self._seen[name].changed(self._buffers_of(name)))

    def learn(self, begun: Sequence[str]) -> None:
        """Collective: broadcasts the buffers of modules from now on, if any rank has named them."""
        named = {name for names in all_gather_objects(list(begun), self._data) for name in names}
        self._changing |= {name: self._described(name) for name in sorted(named)}
        looks = tuple(
            f"{name.partition('.')[2]}.{look}".lstrip(".")  # without the number of the chunk
            for name in sorted(self._changing)
            for look in self._changing[name]
        )
        compare([Field("module buffers that training changes", looks, KEEP_BUFFERS)], self._data)

    @torch.no_grad()
    def sync(self, *, is_taken: bool = True) -> None:
        """Collective: copies the first rank's values to every rank with `is_taken`."""
        tensors = [
            tensor if is_taken else tensor.clone()
            for name in sorted(self._changing)
            for tensor in self._buffers_of(name).values()
        ]
        share_initial(tensors, self._data, self._device)

    def _buffers_of(self, name: str) -> dict[str, Tensor]:
        module = self._modules[name]
        return {
            key: buffer
            for key, buffer in sorted(module._buffers.items())
            if buffer is not None and (module, key) not in self._ignored
        }

    def _described(self, name: str) -> tuple[str, ...]:
        return tuple(
            f"{key} {dtype_name(buffer.dtype)}{list(buffer.shape)}"
            for key, buffer in self._buffers_of(name).items()
        )
