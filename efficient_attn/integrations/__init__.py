"""Bridges to optional packages; each is imported only when asked for."""
