#!/usr/bin/env bash
# A GPT of 125 million params on 8 GPUs of one node, in an unmodified Megatron-LM 23.06 or a fork of it
# (Megatron-DeepSpeed), started by torchrun. Dry-run only; not run on a GPU: untested.
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

ARGUMENTS=(
    --use-distributed-optimizer # each data-parallel rank holds an eighth of the optimizer state
    --bf16                      # bf16 params; grads are accumulated and reduced in fp32, main params are fp32

    # GPT-3 Small (Brown et al. 2020, table 2.1): 12 * 12 * 768^2 in the layers, 40 million in the embeddings.
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --seq-length 2048
    --max-position-embeddings 2048

    # GPT-3's batch for this size, 0.5 million tokens: 256 sequences, 32 microbatches on each of 8 data-parallel ranks.
    # One sequence a microbatch runs everywhere. More is faster (8 fits into 80 GB with --recompute-activations), but
    # Megatron-DeepSpeed 4efb479d then stops in CoreAttention unless it has flash attention (--use-flash-attn-v2).
    --micro-batch-size 1
    --global-batch-size 256

    # 20 tokens a param (Hoffmann et al. 2022) are 2.5 billion, 4800 iterations. GPT-3 saw 300 billion.
    --train-iters 4800

    # GPT-3's: lr for this size, warm-up over 375 million tokens, cosine to a tenth, decoupled decay, clipping.
    --lr 6e-4
    --min-lr 6e-5
    --lr-decay-style cosine
    --lr-warmup-iters 715
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
    --save-interval 1000
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10 # of a global batch each; the default of 100 costs as much as 30 iterations of training
)
export CUDA_DEVICE_MAX_CONNECTIONS=1 # kernels run in the order of their launch; these forks insist
# RUN_BEFORE is a script of yours that mends the fork, then runs what follows it as `python` would. Megatron-DeepSpeed
# 4efb479d needs one without --deepspeed: see configs/README.md. Megatron-LM 23.06: none is known of.
exec torchrun --standalone --nproc-per-node 8 \
    ${RUN_BEFORE:+"$RUN_BEFORE"} -m megatron_distopt "$MEGATRON_FORK/pretrain_gpt.py" "${ARGUMENTS[@]}" "$@"
