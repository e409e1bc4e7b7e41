#!/usr/bin/env bash
# CodeParrot-small, as in Hugging Face's "How to train a Language Model with Megatron-LM" (2022): the same options, with
# trimegatron's commands and torchrun in place of Megatron's scripts and torch.distributed.launch.
#
#   docs/codeparrot.sh        8 GPUs, in a folder that holds codeparrot_data.json, vocab.json and merges.txt
#   SMALL=1 docs/codeparrot.sh   the same lines with toy sizes, 2 processes on a CPU; the project's tests run this
set -euo pipefail

GPUS_PER_NODE=8 TENSOR=1 DEVICE=auto WORKERS=32
LAYERS=12 HIDDEN=768 HEADS=12 SEQUENCE=1024
MICRO_BATCH=12 GLOBAL_BATCH=192
ITERATIONS=150000 WARMUP=2000 LOG=10 SAVE=2000 EVAL=200 EVAL_ITERATIONS=10
if [ -n "${SMALL:-}" ]; then
    GPUS_PER_NODE=2 TENSOR=2 DEVICE=cpu WORKERS=2
    LAYERS=2 HIDDEN=32 HEADS=4 SEQUENCE=32
    MICRO_BATCH=2 GLOBAL_BATCH=4
    ITERATIONS=40 WARMUP=4 LOG=10 SAVE=20 EVAL=20 EVAL_ITERATIONS=2
fi

trimegatron preprocess \
    --input codeparrot_data.json \
    --output-prefix codeparrot \
    --vocab vocab.json \
    --dataset-impl mmap \
    --tokenizer-type GPT2BPETokenizer \
    --merge-file merges.txt \
    --json-keys content \
    --workers "$WORKERS" \
    --chunk-size 25 \
    --append-eod

CHECKPOINT_PATH=experiments/codeparrot-small
GPT_ARGS="--num-layers $LAYERS
    --hidden-size $HIDDEN
    --num-attention-heads $HEADS
    --seq-length $SEQUENCE
    --max-position-embeddings $SEQUENCE
    --micro-batch-size $MICRO_BATCH
    --global-batch-size $GLOBAL_BATCH
    --lr 0.0005
    --train-iters $ITERATIONS
    --lr-decay-iters $ITERATIONS
    --lr-decay-style cosine
    --lr-warmup-iters $WARMUP
    --weight-decay .1
    --adam-beta2 .999
    --fp16
    --log-interval $LOG
    --save-interval $SAVE
    --eval-interval $EVAL
    --eval-iters $EVAL_ITERATIONS"
TENSORBOARD_ARGS="--tensorboard-dir experiments/tensorboard"

# shellcheck disable=SC2086  (the options are words)
torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes 1 --node_rank 0 --master_addr localhost --master_port "${MASTER_PORT:-6001}" \
    -m trimegatron.train \
    --tensor-model-parallel-size "$TENSOR" \
    --pipeline-model-parallel-size 1 \
    $GPT_ARGS \
    --vocab-file vocab.json \
    --merge-file merges.txt \
    --save $CHECKPOINT_PATH \
    --load $CHECKPOINT_PATH \
    --data-path codeparrot_content_document \
    --device "$DEVICE" \
    $TENSORBOARD_ARGS

trimegatron convert to-hf --load $CHECKPOINT_PATH --output codeparrot-small
