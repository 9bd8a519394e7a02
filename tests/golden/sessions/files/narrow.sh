# Megatron-Bridge's perf recipes by their overrides
torchrun --nproc_per_node 8 --nnodes 8 run_recipe.py --recipe qwen3_30b_a3b_pretrain_config \
    mixed_precision=bf16_with_mxfp8_mixed model.tensor_model_parallel_size=1 \
    model.pipeline_model_parallel_size=1 model.expert_model_parallel_size=8 \
    model.seq_length=4096 train.micro_batch_size=1 train.global_batch_size=512 \
    optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=fp8 \
    optimizer.exp_avg_sq_dtype=bf16 optimizer.main_grads_dtype=bf16
