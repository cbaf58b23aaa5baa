"""Communication. The only folder, beside checkpoint/, that imports torch.distributed."""

from megatron_distopt.comm.agree import Field, compare, exchange, exchange_together, meet, raise_together
from megatron_distopt.comm.collectives import described, gather_to_first, scatter_from_first, sum_over
from megatron_distopt.comm.grad_overlap import GradOverlap
from megatron_distopt.comm.grad_sync import reduce_grads
from megatron_distopt.comm.groups import Group, ProcessGroup, is_initialized
from megatron_distopt.comm.param_sync import gather_params, share_initial

__all__ = [
    "Field",
    "GradOverlap",
    "Group",
    "ProcessGroup",
    "compare",
    "described",
    "exchange",
    "exchange_together",
    "gather_params",
    "gather_to_first",
    "is_initialized",
    "meet",
    "raise_together",
    "reduce_grads",
    "scatter_from_first",
    "share_initial",
    "sum_over",
]
