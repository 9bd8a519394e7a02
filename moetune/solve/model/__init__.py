"""The parts of a whole model on one rank: their costs, memory and stages."""
