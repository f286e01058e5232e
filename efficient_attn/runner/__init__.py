"""Plans, records and the running of measurements."""
