"""Tensors in 8 bits with scales, and products of them: for the runtime and for measurements."""
