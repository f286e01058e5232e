"""Queries, keys and values of a real encoder on public-domain prose; see PROVENANCE.md."""
