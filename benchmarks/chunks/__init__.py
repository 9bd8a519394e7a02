"""Model states in chunks beside the sharded training of PyTorch and DeepSpeed."""
