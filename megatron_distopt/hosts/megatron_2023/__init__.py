"""The forks of 2023: Megatron-LM 23.x, Megatron-DeepSpeed and their children.

`facts` is data and imports nothing of the host; `adapter` builds; `optimizer` holds the class that the host gets;
`buffers` and `groups` say over which ranks each param is sharded; `start` decides, also what is overlapped, and
`communication` communicates; `checkpoint` answers the fork's checkpointing, with `state` where every rank has its own
file and `state_gathered` where one has all of it; `resplit` sends values to the ranks whose files they belong to.
"""
