"""Formulas: pure functions of tensors, without state."""
