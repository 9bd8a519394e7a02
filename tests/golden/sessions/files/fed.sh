source sizes/qwen.sh
srun --ntasks-per-node=1 bash -l <<EOF
torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py ${SIZES[@]} --bf16 \
    --expert-model-parallel-size 8 --seq-length 4096 --global-batch-size 128
EOF
