"""Offline exchange with the files of the forks of 2023: one process, no process group, no fork installed.

Every file becomes a `Source`, named by the fork's own names in the whole model; every `Source` becomes any file.
Nothing that a file says is executed, see safe.py.
"""

from megatron_distopt.checkpoint.exchange.convert import TARGETS, Converted, convert, open_any
from megatron_distopt.checkpoint.exchange.part import check_step

__all__ = ["TARGETS", "Converted", "check_step", "convert", "open_any"]
