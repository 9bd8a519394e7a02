#SBATCH --nodes=2
#SBATCH --gres=gpu:h100:8
source sizes/qwen.sh
srun --ntasks-per-node=1 bash -l <<EOF
torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE pretrain_gpt.py ${SIZES[@]} --bf16 \
    --expert-model-parallel-size 8 --seq-length 4096 --global-batch-size 128
EOF
