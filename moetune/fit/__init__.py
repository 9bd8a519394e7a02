"""Samples to costs, with the error of the fit.

profile    samples to a Profile
costs      a Profile to the Costs that the solvers read
resample   a Profile to many Costs that its noise allows

pool       raw samples to one series of times for each operation
curve      monotone prediction between measured sizes
line       α–β lines by relative least squares, with their bootstrap interval
gemm       matrix products of shapes that were not measured
quality    leave-one-out error to a label
book       what a profile knows of each operation
predictor  how that becomes a prediction
missing    what to say where it knows nothing
"""
