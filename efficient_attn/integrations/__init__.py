"""Integrations with optional packages, each imported when used."""
