SIZES=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights
    --vocab-size 151936 --sequence-parallell
)
