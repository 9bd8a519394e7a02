#!/bin/bash
# A launch of Mixtral whose recompute list is ignored and whose overlap is off.
NUM_NODES=${NUM_NODES:-4}
PARALLEL=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
)
MOE="--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall"
torchrun --nproc_per_node 8 --nnodes $NUM_NODES pretrain_gpt.py \
    "${PARALLEL[@]}" $MOE \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --seq-length 4096 \
    --max-position-embeddings 4096 --swiglu --disable-bias-linear --normalization RMSNorm \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --micro-batch-size 1 --global-batch-size 256 --bf16 --vocab-size 32000 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --recompute-modules moe_act --overlap-moe-expert-parallel-comm $@
