"""Formulas: pure functions of tensors. Nothing here keeps anything."""
