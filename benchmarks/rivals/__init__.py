"""An adapted Qwen3-MoE beside expert and data parallelism of others, on links of a set rate."""
