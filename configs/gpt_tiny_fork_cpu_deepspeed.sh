#!/usr/bin/env bash
# A GPT of 0.2 million params on two CPU ranks over gloo, in Megatron-DeepSpeed without --deepspeed, started by
# the DeepSpeed launcher. Some 20 seconds.
# A complete launch file: copy it and change the numbers. Further arguments go to the script and come last, so they win.
# It trains in fp32: --bf16 or --fp16 at the end makes it 16-bit.
# No --deepspeed: with it the engine of DeepSpeed owns the optimizer, so it and --use-distributed-optimizer exclude each
# other. The DeepSpeed launcher starts ranks of either kind.
set -euo pipefail

: "${MEGATRON_FORK:?must be the folder of pretrain_gpt.py. Type: export MEGATRON_FORK=path/to/Megatron-DeepSpeed}"
: "${DATA:?must be the indexed data, without .bin and .idx. Type: export DATA=path/to/my_text_document}"
: "${VOCAB_FILE:?must be the vocabulary of GPT-2. Type: export VOCAB_FILE=path/to/vocab.json}"
: "${MERGE_FILE:?must be the merges of GPT-2. Type: export MERGE_FILE=path/to/merges.txt}"

ARGUMENTS=(
    --use-distributed-optimizer # each rank holds half of the optimizer state
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 64
    --max-position-embeddings 64
    --micro-batch-size 2
    --global-batch-size 8 # two microbatches on each of two ranks
    --train-iters 20
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-iters 2
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234

    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --data-path "$DATA"
    --data-cache-path "${DATA_CACHE:-$(mktemp -d)}" # the folder of the data may be read-only
    --split 95,4,1
    --num-workers 0 # two ranks share the cores
    --log-interval 1
    --eval-interval 1000
    --eval-iters 1

    # Kernels that are written for CUDA only.
    --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
    --no-bias-gelu-fusion
    --no-bias-dropout-fusion
)
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} # the fork asks DeepSpeed for its device and its backend
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two ranks share the cores
# RUN_BEFORE is a script of yours that mends the fork, then runs what follows it as `python` would. Megatron-DeepSpeed
# 4efb479d does not start without one, and more on a CPU and today's torch: see configs/README.md.
if [[ -n ${RUN_BEFORE:-} ]]; then
    RUNNER=("$RUN_BEFORE" -m megatron_distopt)
else
    RUNNER=(--module megatron_distopt)
fi
# Without a count the launcher starts one rank where it finds no GPU.
exec deepspeed --num_accelerators 2 --master_port "${MASTER_PORT:-29500}" \
    "${RUNNER[@]}" "$MEGATRON_FORK/pretrain_gpt.py" "${ARGUMENTS[@]}" "$@"
