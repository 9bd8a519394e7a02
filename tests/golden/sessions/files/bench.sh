GPU=${GPU:-gb200}
for precision in fp8_mx bf16; do
    python scripts/performance/setup_experiment.py --account team --partition batch \
        -m qwen -mr qwen3_30b_a3b --gpu $GPU -ng 64 -c $precision -mb 2 model.moe_permute_fusion=false
done
