#!/bin/bash
#SBATCH -N 2 --exclusive
#SBATCH --gres=gpu:h100:8
#SBATCH --ntasks-per-node=8   # a process for each GPU
source sizes/qwen.sh
COMMAND="python -u pretrain_gpt.py ${SIZES[*]} --bf16 --use-distributed-optimizer \
    --expert-model-parallel-size 8 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128"
srun -l --container-image megatron.sqsh --output=%x_%j.log sh -c "$COMMAND"
