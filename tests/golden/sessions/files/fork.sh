deepspeed pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --num-experts 128 --moe-expert-parallel-size 64 --micro-batch-size 8 --seq-length 2048 \
    --vocab-file vocab.json --merge-file merges.txt --deepspeed --deepspeed_config ds.json
