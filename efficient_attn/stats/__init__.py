"""Statistics of records."""
