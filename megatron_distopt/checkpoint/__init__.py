"""What survives a restart."""

from megatron_distopt.checkpoint.state import check_local_state_dict, load_local_state_dict, local_state_dict

__all__ = ["check_local_state_dict", "load_local_state_dict", "local_state_dict"]
