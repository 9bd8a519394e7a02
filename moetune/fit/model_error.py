"""Error of predicted steps besides that of their costs, from steps predicted and measured.

A cell is one layer, number of tokens and machine, with several choices (degrees, or layouts). Its
residuals are log(measured / predicted), one for each choice. What they have in common widens a
plan's range and moves no choice; what is each choice's own also decides how sure the choice is.
Tests work them out of the record, by medians: a few wild steps do not move them.
"""

from moetune.domain.costs import ModelError

OF_LAYERS = ModelError(common=0.0, own=0.068)
"""Of the network lab's record from before whole steps were measured, of sums of operations:
12 cells with five degrees each (`docs/results/netlab-sums.json`). The errors of near degrees are
alike, and those of one chunk and of many are not: nothing is common."""
