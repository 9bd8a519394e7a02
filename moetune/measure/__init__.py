"""Run operations on this machine and keep their raw times."""
