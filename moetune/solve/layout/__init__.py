"""The layout of a whole model: ranks, stages, micro-batches and model states."""
