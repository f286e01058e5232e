"""Conformance suite: one small function per promise of a backend, named after the promise."""
