"""Samples to costs, with the error of every fit.

pool          raw samples and tables to one series of times for each operation
curve         monotone prediction between measured sizes, and its errors
extrapolation errors beyond the measured sizes, and of stand-ins
gemm          GEMMs of shapes that were not measured
interference  slowdown of operations that overlap
profile       samples to a Profile: α–β lines with their errors
index         a profile's operations by key
missing       errors for those it lacks
collectives   groups that were not measured: the nearest one, or the rule for more ranks
operations    what each operation is predicted from, with its trust
costs         a Profile to the Costs that the solvers read
variants      a Profile to many Costs within its noise
based         a machine with a reference machine for the rest, measured or described
speeds        profiles of faster parts, and costs of which one part takes longer
step_errors   errors of predicted steps, from measured ones
"""
