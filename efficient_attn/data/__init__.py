"""Queries, keys and values of a real encoder and a real decoder, with their texts; see PROVENANCE.md."""
