"""Examples: a language model with experts, trained under any layout, or with a plan."""
