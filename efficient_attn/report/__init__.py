"""From records to tables and plots; nothing is measured here."""
