"""Views: plans, profiles and comparisons as neutral `Section`s."""
