"""Collectives among ranks, for the runtime and the measurements, and a clean end after them."""
