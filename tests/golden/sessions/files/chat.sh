python chatlearn/entrypoint.py grpo --config-file template/grpo_megatron.yaml \
    models.policy_trainer.tensor_model_parallel_size=2 models.policy_trainer.train_micro_batch_size=8
