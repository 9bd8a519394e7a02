"""Collectives among ranks, below the runtime and the measurements, and a clean end after them."""
