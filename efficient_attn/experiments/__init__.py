"""Experiments: the functions behind commands and notebooks."""
