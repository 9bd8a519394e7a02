"""Pure solvers from costs to a plan: equal input gives an equal plan, to the last digit."""
