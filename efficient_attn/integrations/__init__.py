"""Integrations with optional packages; each is imported only when used."""
