"""Communication. The only folder, beside checkpoint/, that imports torch.distributed."""

from megatron_distopt.comm.agree import Field, compare, exchange, exchange_together, meet, raise_together
from megatron_distopt.comm.clock import CommTime, waited_since
from megatron_distopt.comm.collectives import (
    AS_THEY_ARE,
    Reduction,
    described,
    gather_to_first,
    scatter_from_first,
    shares_memory,
    sum_over,
)
from megatron_distopt.comm.grad_overlap import GradOverlap, check_alone
from megatron_distopt.comm.grad_sync import reduce_grads
from megatron_distopt.comm.groups import Group, ProcessGroup, is_initialized
from megatron_distopt.comm.param_overlap import ParamOverlap
from megatron_distopt.comm.param_sync import gather_params, share_initial
from megatron_distopt.comm.ranges import Marker, mark_with, profiled
from megatron_distopt.comm.shared_memory import allow_shared_memory
from megatron_distopt.comm.trial import try_collectives

__all__ = [
    "AS_THEY_ARE",
    "CommTime",
    "Field",
    "GradOverlap",
    "Group",
    "Marker",
    "ParamOverlap",
    "ProcessGroup",
    "Reduction",
    "allow_shared_memory",
    "check_alone",
    "compare",
    "described",
    "exchange",
    "exchange_together",
    "gather_params",
    "gather_to_first",
    "is_initialized",
    "mark_with",
    "meet",
    "profiled",
    "raise_together",
    "reduce_grads",
    "scatter_from_first",
    "share_initial",
    "shares_memory",
    "sum_over",
    "try_collectives",
    "waited_since",
]
