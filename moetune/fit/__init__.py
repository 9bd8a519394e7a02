"""Samples to costs, with the error of every fit.

pool          raw samples to one series of times for each operation
line          α–β lines by relative least squares, with their bootstrap interval
curve         monotone prediction between measured sizes
gemm          GEMMs of shapes that were not measured
interference  slowdown of operations that overlap
profile       samples to a Profile
index         a profile's operations by key, and the errors for those it lacks
collectives   stand-ins for collectives of groups that were not measured
predictor     points and lines to predictions with their trust
costs         a Profile to the Costs that the solvers read
variants      a Profile to many Costs within its noise, or to that of a faster machine
"""
