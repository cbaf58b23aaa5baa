"""How much memory does training need here, compared with 6 + 12/n bytes an element and with
peers?"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from peers.memory_reading import MemoryReading, read, target
from peers.report import OURS
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting

from gpu_check.checks import Check, Found, Place, SkipError, Where, WrongError
from gpu_check.machine import (
    CPU,
    empty_cache,
    memory_now,
    most_memory,
    reset_most_memory,
    synchronize,
)
from gpu_check.peers import memory_peers

#: So few tokens that what is measured is not activations.
_VOCABULARY, _SEQUENCE = 256, 8
_GIB = 1 << 30
#: Of the target: what buckets are padded with, and tensors that do not grow with the model.
_MARGIN = 1.05


def held(place: Place) -> Found:
    """Bytes of tensors between two steps, and at the peak of one."""
    setting = _setting(place)
    readings = []
    for entry in memory_peers(place):
        place.say(entry.name)
        _read(place, entry, replace(setting, layers=1, hidden=128))  # imports, first connections
        readings.append(_read(place, entry, setting))
    ours = next(reading for reading in readings if reading.contestant == OURS)
    if ours.why_not:
        raise WrongError(f"ours did not run: {ours.why_not}")
    between, peak, wanted = ours.held / ours.numel, ours.step_peak / ours.numel, target(place.size)
    figures = {
        "numel": ours.numel,
        "target": wanted,
        "contestants": [asdict(each) for each in readings],
    }
    if between > _MARGIN * wanted:
        raise WrongError(
            f"{between:.2f} bytes an element are held between steps, not 6 + 12/n = {wanted:.2f}"
        )
    said = (
        f"{between:.2f} bytes an element held, {peak:.2f} at the peak of a step; 6 + 12/n = "
        f"{wanted:.2f}"
    )
    return Found(f"{said}; {ours.numel / 1e6:.1f} M elements", figures)


def _setting(place: Place) -> TrainSetting:
    is_large = place.device.type != CPU and place.memory_nbytes >= 12 * _GIB
    hidden = 2048 if is_large else 512
    layers = 4
    return TrainSetting(
        layers,
        hidden,
        _VOCABULARY,
        _SEQUENCE,
        1,
        12 * hidden**2,
        place.rank,
        place.size,
        str(place.device),
    )


def _read(place: Place, entry: TrainEntry, setting: TrainSetting) -> MemoryReading:
    """Collective: of the rank that needed most."""
    if place.device.type == CPU:
        return read(entry, setting)
    if memory_now(place.device) is None:
        raise SkipError(f"torch counts no memory of {place.device.type}")
    found = read(entry, setting, partial(DeviceGauge, place.device))
    empty_cache(place.device)
    return found


class DeviceGauge:
    """What torch counts on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self._before = self._counted(memory_now)
        self.reset()

    def _counted(self, ask: Callable[[torch.device], int | None]) -> int:
        synchronize(self._device)
        return ask(self._device) or 0

    def reset(self) -> None:
        reset_most_memory(self._device)

    def most(self) -> int:
        return self._counted(most_memory) - self._before

    def held(self) -> int:
        return self._counted(memory_now) - self._before


CHECKS = (Check("held", "bytes an element are 6 + 12/n", held, "memory", Where.ENDS, limit=200),)
