"""Measurements, one per file: time, memory, error, operations, environment."""
