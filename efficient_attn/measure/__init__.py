"""Measurements: inputs, clock, memory, error, environment, cases, records and the measuring process."""
