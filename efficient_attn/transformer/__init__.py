"""Transformer layers, blocks and stacks around any backend."""
