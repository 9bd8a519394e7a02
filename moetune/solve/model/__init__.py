"""What a decoder's training costs in a layout, and the search for the best layout.

Prices: seconds of the parts, schedules, and memory. The search decides the layout over the ranks
(folded experts, virtual stages, context parallelism), the schedule and its stages, the dispatcher,
the overlap and its degrees, recomputation, ZeRO stages, host memory, and where experts are. Every
question of it is a loop over the rows of one table.
"""
