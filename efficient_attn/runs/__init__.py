"""Machinery of runs: study class, engine, files, results."""
