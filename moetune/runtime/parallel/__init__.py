"""Layouts of a whole model: groups, pipeline stages, tensor-parallel layers."""
