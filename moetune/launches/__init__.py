"""Readers and editors of files that start a training run; they run no part of a file."""
