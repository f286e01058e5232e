"""Queries, keys and values of a real encoder on public-domain prose; PROVENANCE.md says whence."""
