"""Closed forms of the errors of random features, in float64, for comparison with measurements.

Vectors are the scaled ones, x = q/d^(1/4) and y = k/d^(1/4), so that the softmax kernel is SM = exp(x·y).
An error is the mean squared error of one kernel entry over SM², given as its natural logarithm, since it
leaves the range of float64 long before attention leaves the range of inputs.
"""
