"""Figures and tables of papers: a file here is one, found by its name; `_…` files are parts of them.

The content of such a file is `efficient_attn.experiments.reproduction.Figure`.
"""
