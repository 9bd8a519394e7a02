source sizes/qwen.sh
ray job submit --address=http://127.0.0.1:8265 -- python3 train.py \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 ${SIZES[@]} --global-batch-size 256 \
    --expert-model-parallel-size 8 --use-dynamic-batch-size --max-tokens-per-gpu 8192
