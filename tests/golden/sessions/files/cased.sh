export GPU=${GPU,,}
if [[ $GPU == "h100" ]]; then
    EXPERTS=8 BACKEND=deepep
elif [[ $GPU == "gb200" ]]; then
    EXPERTS=16 BACKEND=hybridep
fi
srun bash -c "torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train \
    --job.config_file=$PWD/titan.toml --parallelism.expert_parallel_degree=$EXPERTS \
    --parallelism.expert_parallel_comm_backend=$BACKEND --training.local_batch_size=2"
