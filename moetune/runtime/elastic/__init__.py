"""Jobs that stop when a scheduler says so, and go on with another number of ranks."""
