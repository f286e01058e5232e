"""Causal linear attention by segments: all chunks of a segment at once, and a scan over their states."""
