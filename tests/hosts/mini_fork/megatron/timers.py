"""Timers by name, of which none is shown: what the training loop and the optimizers call."""


class Timers:
    def __call__(self, name, log_level=None):
        return self

    def start(self, barrier=False):
        pass

    def stop(self, barrier=False):
        pass
