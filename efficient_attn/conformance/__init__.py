"""The promises of a backend as checks: one small function each, its name the promise."""
