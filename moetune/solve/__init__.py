"""Solvers, from costs to a plan. Pure: the same input gives the same plan, to the last digit."""
