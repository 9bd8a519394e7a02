"""One MoE layer: its degrees, memory strategy and ranges, from measured costs."""
