"""Queries, keys and values of a real encoder and a real decoder, with their texts. See PROVENANCE.md."""
