"""The forks of 2023: Megatron-LM 23.x, Megatron-DeepSpeed and their children.

`facts` is data and imports nothing of the host. `get_in` runs the fork's function, which builds the
class in `optimizer`. `plan` decides everything before a tensor is moved, and `model` moves the
model into buffers. `step` is one step; `checkpoint` answers the fork's checkpointing, with the
fork's own files in `fork_files`.
"""
