accelerate launch --num_processes 8 dpo.py --model_name_or_path Qwen/Qwen3-8B \
    --per_device_train_batch_size 1 --max_length 2048 --output_dir $HOME/out --deepspeed zero.json
