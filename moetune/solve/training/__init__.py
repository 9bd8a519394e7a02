"""Layouts of a decoder's training: prices of its parts, schedules, memory, and the search."""
