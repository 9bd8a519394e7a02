"""Values and vocabulary that every other part shares. Standard library only."""
