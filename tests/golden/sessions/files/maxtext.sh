python3 -m MaxText.train MaxText/configs/base.yml model_name=mixtral-8x7b \
    per_device_batch_size=4 ici_expert_parallelism=8
