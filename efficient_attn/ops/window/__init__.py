"""Softmax attention over a window of neighbouring keys."""
