"""Fits that turn samples into costs, with the error of every fit.

pool          raw samples and tables, merged into one time series for each operation
curve         monotone prediction between measured sizes, and its errors
extrapolation errors beyond the measured sizes, and errors of stand-ins
gemm          GEMMs of shapes that were not measured
interference  slowdown of operations that overlap
profile       a Profile of α–β lines with their errors, fitted to samples
index         a profile's operations by key
missing       errors for operations that a profile lacks
collectives   groups that were not measured: the nearest group, or the rule for more ranks
operations    the source that each operation is predicted from, with its trust
costs         a Profile as the Costs that the solvers read
variants      many Costs drawn within a Profile's noise
based         a machine, measured or described, with a reference machine for the rest
speeds        profiles with faster parts, and costs with a single slower part
step_errors   errors of predicted steps, learned from measured steps
"""
