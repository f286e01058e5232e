"""Attention to a sequence whose tokens are distributed over the ranks of a process group."""
