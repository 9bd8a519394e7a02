"""The layout of a whole model: process groups, pipeline stages, tensor-parallel layers."""
