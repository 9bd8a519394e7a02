"""Cost of a decoder's training under a layout, and the search for the best layout.

Prices are the seconds of the parts, schedules, and memory. The search decides the layout over the
ranks (folded experts, virtual stages, context parallelism), the schedule and its stages, the
dispatcher, the overlap and its degrees, recomputation, ZeRO stages, host memory, and the placement
of experts. Every question to the search is a loop over the rows of one table.
"""
