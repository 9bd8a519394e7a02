"""What takes minutes and prints a table."""
