worker=$(cat <<EOM
python scripts/performance/run_script.py --model_recipe_name qwen3_30b_a3b --gpu h100 \
    --num_gpus 16 --tensor_model_parallel_size 2
EOM
)
echo "$worker" > worker.sh
torchrun --nproc_per_node 8 --no-python bash worker.sh
