accelerate launch --config_file configs/zero3.yaml --num_processes 8 sft.py \
    --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --max_length 2048
