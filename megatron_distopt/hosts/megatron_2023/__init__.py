"""The forks of 2023: Megatron-LM 23.x, Megatron-DeepSpeed and their children.

`facts` is data and imports nothing of the host; `adapter` builds; `optimizer` holds the class that the host gets;
`buffers` and `groups` say over which ranks each param is sharded; `start` decides, also what is overlapped, and
`communication` communicates;
`state_per_rank` (with `resplit`, where buckets are not the file's) and `state_gathered` bring state into the fork's two
file layouts and back.
"""
