torchrun --nproc_per_node 8 tools/convert.py --num-layers 27 --hidden-size 2048 --num-attention-heads 16 \
    --expert-model-parallel-size 2 --seq-length 1 --micro-batch-size 1
