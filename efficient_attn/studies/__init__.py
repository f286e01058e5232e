"""One file or folder per study; what lies here is a command and a function of `efficient_attn`."""
