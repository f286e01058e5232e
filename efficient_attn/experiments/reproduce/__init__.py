"""Figures and tables of papers: a file here is one, found by its name; `_…` files are parts of them.

What such a file has to hold is `efficient_attn.experiments.reproduction.Figure`.
"""
