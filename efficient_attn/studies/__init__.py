"""One file or folder per study. What lies here is a command and a function of `efficient_attn`."""
