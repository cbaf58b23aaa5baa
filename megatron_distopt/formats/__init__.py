"""Files of other software: one reader and one writer for each layout.

Every file becomes a `Source`, named by the software's own names in the whole model; every `Source`
becomes any file that can be written. Nothing that a file says is executed, see pickles.py. Hosts
use the same readers and writers for the files that their fork saves and loads.
"""

from megatron_distopt.formats.common import check_step
from megatron_distopt.formats.conversion import TARGETS, Converted, convert
from megatron_distopt.formats.recognise import open_any

__all__ = ["TARGETS", "Converted", "check_step", "convert", "open_any"]
