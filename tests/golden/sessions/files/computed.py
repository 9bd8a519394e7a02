from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
from megatron.sizes import sizes_of


def config() -> object:
    cfg = qwen3_30b_a3b_pretrain_config()
    cfg.model.tensor_model_parallel_size = sizes_of("qwen", width=2048)
    cfg.train.micro_batch_size = 1
    return cfg
