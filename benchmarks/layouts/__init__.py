"""Layouts of a whole model: what the solver says, and what a step takes in the network lab."""
