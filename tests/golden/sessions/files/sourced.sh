HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/sizes/qwen.sh"
. ./site.sh
torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py "${SIZES[@]}" --bf16 \
    --expert-model-parallel-size 8 --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 128 --use-distributed-optimizer --tokenizer-type $KIND
