"""Closed forms: errors of random features, operation counts."""
