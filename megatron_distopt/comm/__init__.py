"""Communication. The only folder, besides checkpoint/, that imports torch.distributed."""

from torch.distributed import ProcessGroup

from megatron_distopt.comm.agree import (
    Field,
    compare,
    exchange,
    exchange_together,
    meet,
    raise_together,
    show_presence,
    two_that_differ,
)
from megatron_distopt.comm.alive import LifeSigns
from megatron_distopt.comm.calls import meet_in_call
from megatron_distopt.comm.collectives import (
    AS_THEY_ARE,
    Reduction,
    Tally,
    broadcast,
    described,
    gather_params,
    gather_to_first,
    profiled,
    reduce_grads,
    share_initial,
    shares_memory,
    sum_over,
    try_collectives,
)
from megatron_distopt.comm.communicator import Communicator
from megatron_distopt.comm.groups import (
    Group,
    available_backends,
    carrier_of,
    default_backend,
    is_initialized,
)
from megatron_distopt.comm.shared_memory import allow_shared_memory

__all__ = [
    "AS_THEY_ARE",
    "Communicator",
    "Field",
    "Group",
    "LifeSigns",
    "ProcessGroup",
    "Reduction",
    "Tally",
    "allow_shared_memory",
    "available_backends",
    "broadcast",
    "carrier_of",
    "compare",
    "default_backend",
    "described",
    "exchange",
    "exchange_together",
    "gather_params",
    "gather_to_first",
    "is_initialized",
    "meet",
    "meet_in_call",
    "profiled",
    "raise_together",
    "reduce_grads",
    "share_initial",
    "shares_memory",
    "show_presence",
    "sum_over",
    "try_collectives",
    "two_that_differ",
]
