"""Communication. The only folder, besides checkpoint/, that imports torch.distributed."""

from torch.distributed import ProcessGroup

from megatron_distopt.comm.agree import (
    Field,
    all_gather_objects,
    all_gather_results,
    compare,
    raise_together,
    two_that_differ,
)
from megatron_distopt.comm.alive import LifeSigns
from megatron_distopt.comm.collectives import (
    PLAIN_SUM,
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
)
from megatron_distopt.comm.communicator import Communicator
from megatron_distopt.comm.group_nodes import allow_shared_memory
from megatron_distopt.comm.groups import (
    Group,
    available_backends,
    backend_of,
    default_backend,
    is_initialized,
)
from megatron_distopt.comm.meeting import meet, meet_in_call, show_presence
from megatron_distopt.comm.trial import try_collectives

__all__ = [
    "PLAIN_SUM",
    "Communicator",
    "Field",
    "Group",
    "LifeSigns",
    "ProcessGroup",
    "Reduction",
    "Tally",
    "all_gather_objects",
    "all_gather_results",
    "allow_shared_memory",
    "available_backends",
    "backend_of",
    "broadcast",
    "compare",
    "default_backend",
    "described",
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
