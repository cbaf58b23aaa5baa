#!/usr/bin/env bash
# A GPT of 0.1 million params on two ranks, started by torchrun: gloo on CPUs, NCCL where there are GPUs. Some 15 seconds.
# A complete launch file: copy it and change the numbers. Further arguments go to the script and come last, so they win.
set -euo pipefail

ARGUMENTS=(
    --use-distributed-optimizer # each rank holds half of the optimizer state
    --bf16                      # bf16 params, fp32 grads, fp32 main params
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 64
    --micro-batch-size 4
    --num-microbatches 2 # gradients are accumulated over two microbatches
    --train-iters 20
    --lr 1e-3
    --seed 1234
)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two ranks share the cores
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec torchrun --standalone --nproc-per-node 2 examples/pretrain_gpt_core.py "${ARGUMENTS[@]}" "$@"
