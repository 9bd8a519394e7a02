"""Data-parallel gradients beside the experts' exchanges: DDP's buckets against planned pieces."""
