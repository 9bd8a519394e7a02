#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
source sizes/qwen.sh
srun --mpi=pmix python pretrain_gpt.py ${SIZES[@]} --seq-length 4096 --micro-batch-size 1
