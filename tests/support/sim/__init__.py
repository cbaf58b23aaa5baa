"""A simulated accelerator: the device `sim` of torch, asynchronous, whose kernels run on the CPU.

It does what a GPU does to a program and a CPU does not: operations are queued and carried out
later, on several streams in an order that a seed decides; freed memory is overwritten; backward
runs in a thread with a stream of its own; collectives are queued on streams of their own. A program
that forgets to wait computes wrong numbers under some seed.
What it cannot do: an exception in a hook of backward ends the process (torch's guard of a device in
Python throws while the exception goes by), and memory is never short.

`machine` streams and the order of operations; `memory` what is allocated; `operators` torch's
operators on it; `collectives` its backend of torch.distributed, `simccl`; `device` makes all of it
a device of torch (`install`).
"""

from tests.support.sim.device import Personality, install
from tests.support.sim.machine import Counts, machine

__all__ = ["Counts", "Personality", "install", "machine"]
