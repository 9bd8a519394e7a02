"""Samples to costs, with the error of every fit.

pool          raw samples to one series of times for each operation
line          α–β lines by relative least squares, with their bootstrap interval
curve         monotone prediction between measured sizes
gemm          GEMMs of shapes that were not measured
interference  slowdown of operations that overlap
profile       samples to a Profile
reference     tables of others beside the samples
index         a profile's operations by key
missing       errors for those it lacks
collectives   stand-ins for collectives of groups that were not measured
nodes         the rule for groups of more nodes, or of more ranks in one
merged        a measured profile with a reference of its device for the rest
operations    what each operation is predicted from, and what stands in for it
predictor     its times, with their trust
costs         a Profile to the Costs that the solvers read
variants      a Profile to many Costs within its noise, or to that of a faster machine
"""
