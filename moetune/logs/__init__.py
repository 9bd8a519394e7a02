"""Logs of training runs: steps, memory and timers from the lines that each runtime prints."""
