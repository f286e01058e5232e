"""One question per file: how long, how much memory, on which machine, how wrong."""
