NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-30B-A3B --max_length 4096 \
    --expert_model_parallel_size 8 --global_batch_size 64 --tuner_type full
