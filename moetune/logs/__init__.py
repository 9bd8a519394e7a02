"""Logs of training runs: their steps, memory and timers, by the lines of each runtime."""
