"""The joint search of a decoder's training plan, and its front of time against memory.

One decision: the layout over the ranks (folded experts, virtual stages, context parallelism), the
schedule and its stages, the dispatcher, the overlap and its degrees, recomputation, ZeRO stages,
host memory, and where experts are. Every question is a loop over the rows of one table, whose
prices and bytes come from `solve.training`.
"""
