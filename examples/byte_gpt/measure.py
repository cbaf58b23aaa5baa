"""Measure this machine on all ranks at once, and choose together what fits it."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from byte_gpt.choose import Choice, Insisted, Probe, Trial, choose, choose_precision
from byte_gpt.data import Text
from byte_gpt.records import Iteration
from byte_gpt.settings import Precision, Settings, Source
from byte_gpt.train import iterate
from byte_gpt.trainer import training

PROBE_WINDOWS = 2  # of a rank: one alone is slower than its share of a larger batch
MOST_REPEATS = 5
SECONDS_OF_REPEATS = 1.5


def measure(
    settings: Settings,
    insisted: Insisted,
    text: Text,
    device: torch.device,
    *,
    seconds_before: Callable[[], float],
) -> Choice:
    """Collective: the same choice on all ranks, by the times of the slowest.

    Args:
        settings: with the seed and the optimizer that will train.
        insisted: what the user gave; what is given needs no measurement.
        text: to train on.
        device: of this rank.
        seconds_before: how long ago it all began, on this rank.
    """
    candidates = _candidates(device)
    with _without_start_up_blocks():
        trials = (
            ()
            if insisted.precision or len(candidates) == 1
            else _trials(settings, candidates, text, device)
        )
        precision = choose_precision(insisted, candidates=candidates, trials=trials)
        probe = None
        if insisted.iterations is None:
            probe = _probe(replace(settings, precision=precision), text, device, seconds_before)
    ranks = torch.distributed.get_world_size()
    return choose(insisted, precision=precision, trials=trials, probe=probe, ranks=ranks)


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Collective: of each time the largest of all ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return [float(each) for each in largest]


def _candidates(device: torch.device) -> tuple[Precision, ...]:
    """Collective. A CPU without instructions for bf16 emulates them, 3 to 25 times slower than
    fp32, and torch does not say so: that has to be tried. A GPU says what it has. fp16 is for who
    asks for it."""
    if device.type == "cpu":
        return Precision.BF16, Precision.FP32
    lacks_bf16 = float(not torch.cuda.is_bf16_supported(including_emulation=False))
    return (Precision.FP32,) if slowest([lacks_bf16], device)[0] else (Precision.BF16,)


def _trials(
    settings: Settings, candidates: tuple[Precision, ...], text: Text, device: torch.device
) -> tuple[Trial, ...]:
    """Collective. One layer and one window: where bf16 is emulated, an iteration of it all takes
    half a minute."""
    small = replace(settings, num_layers=1, micro_batch_size=1)
    seconds = []
    for precision in candidates:
        iterations = _measured(replace(small, precision=precision), text, device)
        seconds.append(statistics.median(iteration.step.seconds for iteration in iterations))
    return tuple(map(Trial, candidates, slowest(seconds, device)))


def _probe(
    settings: Settings, text: Text, device: torch.device, seconds_before: Callable[[], float]
) -> Probe:
    iterations = _measured(replace(settings, micro_batch_size=PROBE_WINDOWS), text, device)
    whole = statistics.median(iteration.step.seconds for iteration in iterations)
    forward_backward = statistics.median(
        iteration.step.forward_backward_seconds for iteration in iterations
    )
    whole, forward_backward, before = slowest([whole, forward_backward, seconds_before()], device)
    # Not the slowest communication: its waiting for the rank of the slowest backward would count
    # twice.
    return Probe(PROBE_WINDOWS, forward_backward, max(0.0, whole - forward_backward), before)


def _measured(settings: Settings, text: Text, device: torch.device) -> list[Iteration]:
    """Collective: a few real iterations, after one in which kernels are made and memory is touched
    first."""
    with training(
        settings, Source.OURS if settings.use_distributed_optimizer else Source.HOST, text, device
    ) as trainer:
        began = time.perf_counter()
        first = iterate(trainer, 1, began)
        # together: all ranks have to repeat as often
        slow = slowest([first.step.seconds], device)[0]
        repeats = max(1, min(MOST_REPEATS, int(SECONDS_OF_REPEATS / slow)))
        return [iterate(trainer, 2 + repeat, began) for repeat in range(repeats)]


@contextmanager
def _without_start_up_blocks() -> Iterator[None]:
    """Our optimizer logs at INFO what it is made of: once is enough, for the one that trains."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
