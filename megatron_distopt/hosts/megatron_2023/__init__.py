"""The forks of 2023: Megatron-LM 23.x, Megatron-DeepSpeed and their children.

`forks` is data and imports nothing of the host. `decisions` decides over `grad_buffers` and
`base_optimizer` before any tensor is moved, and `built` carries it out. `optimizer` has the class
that the fork's function builds: `step` is one step, `checkpoint` answers the fork's checkpointing,
with the fork's own files in `fork_files`.
"""
