"""Faster algorithms for exponential and trigonometric features, equal to the general ones to rounding."""
