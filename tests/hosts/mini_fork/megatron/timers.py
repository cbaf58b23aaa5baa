"""Timers by name, each with a log level; those above the level of the run are dummies."""

import time

import torch

from .utils import print_rank_last


class DummyTimer:
    def start(self, barrier=False):
        pass

    def stop(self, barrier=False):
        pass


class Timer:
    def __init__(self, name):
        self.name, self.elapsed, self._start_time = name, 0.0, None

    def start(self, barrier=False):
        assert self._start_time is None, f"{self.name} runs already"
        if barrier:
            torch.distributed.barrier()
        self._start_time = time.time()

    def stop(self, barrier=False):
        assert self._start_time is not None, f"{self.name} does not run"
        if barrier:
            torch.distributed.barrier()
        self.elapsed += time.time() - self._start_time
        self._start_time = None


class Timers:
    def __init__(self, log_level, log_option="minmax"):
        self._log_level, self._log_option, self._max_log_level = log_level, log_option, 2
        self._timers, self._log_levels, self._dummy_timer = {}, {}, DummyTimer()

    def __call__(self, name, log_level=None):
        """The timer of that name, made at its first call; a name keeps its log level."""
        if name in self._timers:
            assert log_level in (None, self._log_levels[name]), f"timer {name} has level {self._log_levels[name]}"
            return self._timers[name]
        log_level = self._max_log_level if log_level is None else log_level
        assert log_level <= self._max_log_level, f"log level {log_level} is larger than {self._max_log_level}"
        if log_level > self._log_level:
            return self._dummy_timer
        self._log_levels[name] = log_level
        return self._timers.setdefault(name, Timer(name))

    def log(self, names):
        times = {name: self._timers[name].elapsed * 1000 for name in names if name in self._timers}
        print_rank_last("time (ms) | " + " | ".join(f"{name}: {ms:.2f}" for name, ms in times.items()))
