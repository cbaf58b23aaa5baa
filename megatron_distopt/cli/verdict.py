"""What `compare` says about two runs: that they are the same, or where they begin to differ and
where to look.

The order in which things differ tells causes apart. A step computes gradients from params and data,
and then params and moments from gradients. So what differs while the params before were equal comes
from data, forward, backward or the sum over ranks, and what differs after equal gradients comes
from the update.
"""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """What a comparison says; the value is the exit status of the command."""

    SAME = 0
    DIFFERENT = 1
    #: The runs do not decide it: the host's own runs differ as much, or did not run.
    NONE = 3


#: Where to look, by what differs first.
START = "the seed and the checkpoint of the start"
FORWARD = "data, dropout and the forward pass, because both had the same weights"
SUM_OF_GRADIENTS = (
    "the sum of gradients over ranks and their norm, because both had the same weights"
)
UPDATE = "learning rate, clipping and the rule of the update"
STATE = "moments, the precision of main params and other state that one step hands to the next"
OVERFLOW = "what counts as overflow"


def not_the_same(first: str, look: str) -> str:
    return f"Not the same, first {first}. Look at {look}."
