source sizes/qwen.sh
export HCCL_CONNECT_TIMEOUT=1200
torchrun --nproc_per_node 8 pretrain_gpt.py ${SIZES[@]} ${MORE} --bf16 --use-fused-swiglu \
    --expert-model-parallel-size 8 --seq-length 4096 --micro-batch-size 1
