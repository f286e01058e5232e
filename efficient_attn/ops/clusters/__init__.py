"""Softmax attention over near keys, and over one summary for each cluster of the other keys."""
