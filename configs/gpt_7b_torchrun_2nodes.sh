#!/usr/bin/env bash
# A GPT of 6.7 billion params on 16 GPUs, two nodes of 8, in an unmodified Megatron-LM 23.06 or a fork of it
# (Megatron-DeepSpeed), started by torchrun. Dry-run only; not run on a GPU: untested.
#
# Start it on both nodes: NODE_RANK=0 on the one, NODE_RANK=1 on the other, everything else the same, MEGATRON_DISTOPT*
# included. Both nodes see the data and the checkpoints under the same paths: rank 0 alone builds the data index.
#
# A complete launch file: copy it and change the numbers. Further arguments go to the script and come last, so they win.
# No --deepspeed: with it the engine of DeepSpeed owns the optimizer, so it and --use-distributed-optimizer exclude each
# other. The DeepSpeed launcher starts ranks of either kind.
set -euo pipefail

: "${MEGATRON_FORK:?must be the folder of pretrain_gpt.py. Type: export MEGATRON_FORK=path/to/Megatron-DeepSpeed}"
: "${DATA:?must be the indexed data, without .bin and .idx. Type: export DATA=path/to/my_text_document}"
: "${VOCAB_FILE:?must be the vocabulary of GPT-2. Type: export VOCAB_FILE=path/to/vocab.json}"
: "${MERGE_FILE:?must be the merges of GPT-2. Type: export MERGE_FILE=path/to/merges.txt}"
: "${CHECKPOINT_DIR:?must be a folder for checkpoints. Type: export CHECKPOINT_DIR=path/to/checkpoints}"
: "${MASTER_ADDR:?must be node 0, on both nodes. Type: export MASTER_ADDR=node0.example.invalid}"
: "${NODE_RANK:?must be 0 on the node of MASTER_ADDR and 1 on the other. Type: export NODE_RANK=0}"

ARGUMENTS=(
    --use-distributed-optimizer # each data-parallel rank holds an eighth of the optimizer state
    --bf16                      # bf16 params; grads are accumulated and reduced in fp32, main params are fp32

    # All tensor parallelism stays inside a node, where it is cheap; 16 / (2 * 1) ranks are data parallel.
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 1
    # On Megatron-LM 23.06 add --sequence-parallel at the end of the command: it divides what tensor parallelism leaves
    # undivided. Not on Megatron-DeepSpeed 4efb479d without --deepspeed: its get_batch and its embedding each cut the
    # sequence, and the attention mask no longer fits.

    # GPT-3 6.7B (Brown et al. 2020, table 2.1): 12 * 32 * 4096^2 in the layers, 0.2 billion in the embeddings.
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048

    # GPT-3's batch for this size, 2 million tokens: 1024 sequences, 128 microbatches on each of 8 data-parallel ranks.
    # A rank has 3.35 billion params: 25 GB at 2 + 4 + 12/8 bytes each, where 18 bytes would be 60 GB. Activations
    # add about 6 GB a sequence. Computed, not measured.
    --micro-batch-size 1
    --global-batch-size 1024
    # Selective: the attention scores are computed again in the backward pass. They are most of the activations and few
    # of the flops. Too little memory: --recompute-granularity full --recompute-method uniform in its place.
    --recompute-activations

    # 20 tokens a param (Hoffmann et al. 2022) are 134 billion, 64000 iterations. GPT-3 saw 300 billion.
    --train-iters 64000

    # GPT-3's: lr for this size, warm-up over 375 million tokens, cosine to a tenth, decoupled decay, clipping.
    --lr 1.2e-4
    --min-lr 1.2e-5
    --lr-decay-style cosine
    --lr-warmup-iters 179
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95 # forgets a spike in 20 steps; Adam's 0.999 remembers it for 1000
    --clip-grad 1.0
    --attention-dropout 0 # as long as no text is seen twice
    --hidden-dropout 0
    --seed 1234

    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --data-path "$DATA"
    --data-cache-path "$CHECKPOINT_DIR/data_cache" # the folder of the data may be read-only
    --split 969,30,1

    # The same command again goes on from the last checkpoint; the first time there is none, and it says so.
    --save "$CHECKPOINT_DIR"
    --load "$CHECKPOINT_DIR"
    --save-interval 500
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10 # of a global batch each; the default of 100 costs as much as 30 iterations of training
)
export CUDA_DEVICE_MAX_CONNECTIONS=1 # kernels run in the order of their launch; these forks insist
# RUN_BEFORE is a script of yours that mends the fork, then runs what follows it as `python` would. Megatron-DeepSpeed
# 4efb479d needs one without --deepspeed: see configs/README.md. Megatron-LM 23.06: none is known of.
exec torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    ${RUN_BEFORE:+"$RUN_BEFORE"} -m megatron_distopt "$MEGATRON_FORK/pretrain_gpt.py" "${ARGUMENTS[@]}" "$@"
