"""The HTTP service: one store for a team, with the command line's answers."""
