"""How much memory does training need here, compared with 6 + 12/n bytes an element and with peers?"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace

from peers.memory_reading import MemoryReading, read
from peers.ranks import exchange
from peers.report import failure
from peers.trainers import TrainEntry
from peers.transformer import TrainSetting, batch

from gpu_check.checks import Check, Found, Place, SkipError, Where, WrongError
from gpu_check.machine import CPU, empty_cache, memory_now, most_memory, reset_most_memory, synchronize
from gpu_check.peers import OURS, memory_peers

#: So few tokens that what is measured is not activations.
_VOCABULARY, _SEQUENCE = 256, 8
_GIB = 1 << 30
#: Of the target: what buckets are padded with, and tensors that do not grow with the model.
_MARGIN = 1.05


def target(ranks: int) -> float:
    """Bytes an element: param 2, grad 4, main param and two moments of the owned part.

    >>> target(4)
    9.0
    """
    return 6 + 12 / ranks


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
    figures = {"numel": ours.numel, "target": wanted, "contestants": [asdict(each) for each in readings]}
    if between > _MARGIN * wanted:
        raise WrongError(f"{between:.2f} bytes an element are held between steps, not 6 + 12/n = {wanted:.2f}")
    said = f"{between:.2f} bytes an element held, {peak:.2f} at the peak of a step; 6 + 12/n = {wanted:.2f}"
    return Found(f"{said}; {ours.numel / 1e6:.1f} M elements", figures)


def _setting(place: Place) -> TrainSetting:
    is_large = place.device.type != CPU and place.memory_nbytes >= 12 * _GIB
    hidden = 2048 if is_large else 512
    layers = 4
    return TrainSetting(
        layers, hidden, _VOCABULARY, _SEQUENCE, 1, 12 * hidden**2, place.rank, place.size, str(place.device)
    )


def _read(place: Place, entry: TrainEntry, setting: TrainSetting) -> MemoryReading:
    """Collective: of the rank that needed most."""
    if place.device.type == CPU:
        return read(entry, setting)
    if memory_now(place.device) is None:
        raise SkipError(f"torch counts no memory of {place.device.type}")
    measured: list[MemoryReading] = []
    texts = exchange(failure(lambda: measured.append(_measure(place, entry, setting))))
    gc.collect()
    empty_cache(place.device)
    why_not = next((text for text in texts if text), "")
    return MemoryReading(entry.name, setting.size, setting.numel, why_not=why_not) if why_not else measured[0]


def _measure(place: Place, entry: TrainEntry, setting: TrainSetting) -> MemoryReading:
    gc.collect()
    before = _now(place)
    reset_most_memory(place.device)
    trainer = entry.build(setting)
    try:
        for step in range(2):
            trainer.train(batch(setting, step))
        build_peak = _most(place) - before
        reset_most_memory(place.device)
        trainer.train(batch(setting, 2))
        trainer.finish()
        step_peak, kept = _most(place) - before, _now(place) - before
    finally:
        trainer.close()
    most = (max(exchange(nbytes)) for nbytes in (kept, step_peak, build_peak))
    return MemoryReading(entry.name, setting.size, setting.numel, *most)


def _now(place: Place) -> int:
    synchronize(place.device)
    return memory_now(place.device) or 0


def _most(place: Place) -> int:
    synchronize(place.device)
    return most_memory(place.device) or 0


CHECKS = (Check("held", "bytes an element are 6 + 12/n", held, "memory", Where.ENDS, limit=200),)
