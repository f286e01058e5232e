"""Causal linear attention segment by segment: all chunks of a segment at once, and a scan over their states."""
